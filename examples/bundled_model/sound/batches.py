"""Batches of recordings for training."""

from __future__ import annotations

from random import Random

import torch
from torch import Tensor

from examples.bundled_model.sound.mel import CHUNK, Mel
from examples.bundled_model.sound.recordings import say
from examples.bundled_model.sound.speech import Clip


def batch(
    rng: Random, voices: list[list[Clip]], mel: Mel, count: int, most: int
) -> tuple[Tensor, Tensor, list[tuple[int, ...]]]:
    """Return spectrograms (padded to the longest), their seconds, and what is said."""
    said, mels = [], []
    for _ in range(count):
        digits, samples = say(rng, rng.choice(voices), most)
        said.append(digits)
        mels.append(mel(samples))
    seconds = torch.tensor([one.shape[1] // CHUNK for one in mels])
    padded = torch.zeros(count, mels[0].shape[0], int(seconds.max()) * CHUNK)
    for index, one in enumerate(mels):
        padded[index, :, : one.shape[1]] = one
    return padded, seconds, said
