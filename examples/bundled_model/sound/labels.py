"""The first lesson of the ears: which digits are said, without the language model.

The loss is CTC over all tokens; the map that guesses is thrown away.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.bundled_model.sound.batches import batch
from examples.bundled_model.sound.encoder import PER_CHUNK, Ears, EarsConfig
from examples.bundled_model.sound.mel import Mel
from examples.bundled_model.sound.speech import Clip, load
from examples.bundled_model.teaching import Lesson

BLANK = 10


def ctc(scores: Tensor, seconds: Tensor, said: list[tuple[int, ...]]) -> Tensor:
    """Return the loss of scores (batch, tokens, 11)."""
    return functional.ctc_loss(
        scores.log_softmax(-1).transpose(0, 1),
        torch.tensor([digit for digits in said for digit in digits]),
        seconds * PER_CHUNK,
        torch.tensor([len(digits) for digits in said]),
        blank=BLANK,
    )


def heard(scores: Tensor, seconds: Tensor) -> list[tuple[int, ...]]:
    """Read the digits off the best label of each token."""
    read = []
    for labels, count in zip(scores.argmax(-1).tolist(), seconds.tolist(), strict=True):
        kept = labels[: count * PER_CHUNK]
        read.append(
            tuple(b for a, b in zip([BLANK, *kept], kept, strict=False) if b != a and b != BLANK)
        )
    return read


def train(
    ears: Ears, head: nn.Linear, voices: list[list[Clip]], minutes: float, output: Path
) -> None:
    """Teach the digits until the time is up."""
    rng, lesson, mel = Random(1), Lesson(ears, head, 0.02), Mel(ears.config.bands)
    start, steps = time.monotonic(), 0
    while (progress := (time.monotonic() - start) / (60 * minutes)) < 1:
        mels, seconds, said = batch(rng, voices, mel, 32, 3 if progress < 0.15 else 6)
        scores = head(ears.features(mels, seconds))
        loss = ctc(scores, seconds, said)
        loss.backward()
        lesson.step(progress)
        steps += 1
        if steps % 50 == 0:
            right = sum(a == b for a, b in zip(heard(scores, seconds), said, strict=True))
            print(f"{steps} {progress:.3f} {float(loss.detach()):.3f} right {right}/32", flush=True)
        if steps % 250 == 0:
            save(ears, head, output)
    save(ears, head, output)


def save(ears: Ears, head: nn.Linear, output: Path) -> None:
    """Write a checkpoint."""
    part = output.with_suffix(".part")
    saved = {"config": asdict(ears.config), "ears": ears.state_dict(), "head": head.state_dict()}
    torch.save(saved, part)
    part.replace(output)


def main() -> None:
    """Teach the ears which digits are said."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--recordings", type=Path, required=True, help="the folder of speech.py")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    voices = load(options.recordings / "train.npz")
    ears = Ears(EarsConfig())
    for unused in (ears.first, ears.first_bias, ears.second, ears.second_bias):
        unused.requires_grad_(False)
    head = nn.Linear(ears.config.width, 11)
    print(f"{sum(p.numel() for p in ears.parameters())} parameters", flush=True)
    train(ears, head, voices, options.minutes, options.output)
    strangers = load(options.recordings / "held-out.npz")
    mels, seconds, said = batch(Random(2), strangers, Mel(ears.config.bands), 200, 5)
    with torch.no_grad():
        read = heard(head(ears.features(mels, seconds)), seconds)
    print("strangers:", sum(a == b for a, b in zip(read, said, strict=True)), "of 200")


if __name__ == "__main__":
    main()
