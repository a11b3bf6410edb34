"""Mel spectrograms as libmtmd makes them for the projector type ``qwen3a``."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

RATE = 16_000
WINDOW = 400
HOP = 160
#: Frames that the encoder takes at once, one second.
CHUNK = 100
FLOOR = 5.960464477539063e-08


def _to_mel(hertz: float) -> float:
    if hertz < 1000:
        return hertz * 3 / 200
    return 15 + math.log(hertz / 1000) / (math.log(6.4) / 27)


def _to_hertz(mel: float) -> float:
    return mel / (3 / 200) if mel < 15 else 1000 * math.exp((mel - 15) * math.log(6.4) / 27)


def filters(bands: int) -> Tensor:
    """Return the triangles of Slaney's scale, (bands, frequencies), each of area one."""
    top = _to_mel(RATE / 2)
    edges = np.array([_to_hertz(top * index / (bands + 1)) for index in range(bands + 2)])
    frequencies = np.arange(WINDOW // 2 + 1) * RATE / WINDOW
    left, centre, right = edges[:-2, None], edges[1:-1, None], edges[2:, None]
    rising = (frequencies - left) / (centre - left)
    falling = (right - frequencies) / (right - centre)
    triangles = np.maximum(0, np.minimum(rising, falling)) * 2 / (right - left)
    return torch.from_numpy(triangles.astype(np.float32))


class Mel:
    """Makes spectrograms of `bands` bands."""

    def __init__(self, bands: int) -> None:
        self.filters = filters(bands)
        self.window = torch.hann_window(WINDOW, periodic=True)

    def __call__(self, samples: npt.NDArray[np.float32]) -> Tensor:
        """Return (bands, frames), padded with zeros to whole seconds."""
        x = functional.pad(torch.from_numpy(samples)[None], (WINDOW // 2,) * 2, "reflect")[0]
        frames = x.unfold(0, WINDOW, HOP) * self.window
        power = torch.fft.rfft(frames).abs().square()
        mel = (self.filters @ power.T).clamp(min=FLOOR).log10()
        mel = (mel.clamp(min=float(mel.max()) - 8) + 4) / 4
        count = min(mel.shape[1], len(samples) // HOP + 1)
        return functional.pad(mel[:, :count], (0, -count % CHUNK))
