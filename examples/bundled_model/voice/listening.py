"""The bundled model's ears as a judge of sound."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.bundled_model.projector import load_ears
from examples.bundled_model.sound.mel import CHUNK, FLOOR, HOP, RATE as HEARD, WINDOW, Mel
from examples.bundled_model.voice.recordings import RATE


class Listener(nn.Module):
    """The ears, with weights that stay."""

    def __init__(self, projector: Path) -> None:
        super().__init__()
        self.ears = load_ears(projector).requires_grad_(False)
        self.mel = Mel(self.ears.config.bands)

    def spectrogram(self, samples: Tensor) -> Tensor:
        """Return what ``Mel`` does, of (batch, samples) at the voice's rate."""
        count = samples.shape[1] * HEARD // RATE
        x = torch.fft.irfft(torch.fft.rfft(samples)[:, : count // 2 + 1], count) * HEARD / RATE
        x = functional.pad(x, (WINDOW // 2, WINDOW // 2), "reflect")
        power = torch.fft.rfft(x.unfold(1, WINDOW, HOP) * self.mel.window).abs().square()
        mel = (self.mel.filters @ power.mT).clamp(min=FLOOR).log10()
        loudest = mel.amax((1, 2), keepdim=True)
        mel = (torch.maximum(mel, loudest - 8) + 4) / 4
        return functional.pad(mel, (0, -mel.shape[2] % CHUNK))

    def forward(self, made: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean distance of what the ears make of two sounds."""
        mels = self.spectrogram(torch.cat((made, wanted)))
        seconds = torch.full((len(mels),), mels.shape[2] // CHUNK)
        one, other = self.ears.features(mels, seconds).chunk(2)
        return (one - other).square().mean()
