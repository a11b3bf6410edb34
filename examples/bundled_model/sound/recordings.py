"""Recordings: digits of one voice, combined differently each time."""

from __future__ import annotations

from random import Random

import numpy as np

from examples.bundled_model.sound.speech import RATE, Clip, Samples

#: Seconds: more than 8 would be two windows of the encoder.
LONGEST = 7.9


def say(rng: Random, voice: list[Clip], most: int) -> tuple[tuple[int, ...], Samples]:
    """Put one to ``most`` digits together: a string spoken at once, or single digits."""
    strings = [clip for clip in voice if 1 < len(clip.digits) <= most]
    if strings and rng.random() < 0.3:
        parts = [rng.choice(strings)]
    else:
        singles = [clip for clip in voice if len(clip.digits) == 1]
        parts = [rng.choice(singles) for _ in range(rng.randint(1, most))]
    pieces: list[Samples] = [_silence(rng.uniform(0.02, 0.7))]
    slow = rng.random() < 0.5
    for part in parts:
        samples = part.samples.astype(np.float32)
        pieces += [samples, _silence(rng.uniform(0.02, 0.5 if slow else 0.12))]
    pieces.append(_silence(rng.uniform(0, 0.6)))
    joined = np.concatenate(pieces)
    if len(joined) > LONGEST * RATE:
        return say(rng, voice, most - 1)
    joined = joined / (np.abs(joined).max() + 1e-6) * 10 ** rng.uniform(-1.3, -0.05)
    noise = 10 ** rng.uniform(-5, -2.3)
    joined = joined + np.random.default_rng(rng.getrandbits(32)).normal(0, noise, len(joined))
    digits = tuple(digit for part in parts for digit in part.digits)
    return digits, joined.astype(np.float32)


def _silence(seconds: float) -> Samples:
    return np.zeros(int(seconds * RATE), np.float32)
