"""Sound as latents: an encoder that is thrown away, and the decoder of the voice.

The decoder computes what libmtmd computes for the projector type ``pockettts_gen``: twelve and
a half latents a second, upsampled to steps of 5 ms, a transformer, three transposed
convolutions. All of it is causal, so that libmtmd may decode window by window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.bundled_model.blocks import matrix
from examples.bundled_model.voice.recordings import FRAME, RATE, STEP

EPSILON = 1e-5
#: Steps that the transformer looks back, and steps of a latent.
CONTEXT, STEPS = 250, FRAME // STEP
RATIOS = (6, 5, 4)


@dataclass(frozen=True)
class CodecConfig:
    """The sizes. Every row of a matrix is a multiple of 32, as Q8_0 wants."""

    latent: int = 64
    width: int = 64
    heads: int = 2
    hidden: int = 128
    layers: int = 1
    channels: tuple[int, ...] = (64, 48, 24, 12)
    bands: int = 64


def rotate(x: Tensor) -> Tensor:
    """Turn neighbouring numbers of (batch, heads, places, size) by their place."""
    size, places = x.shape[-1], x.shape[-2]
    speeds = 10000.0 ** (-torch.arange(0, size, 2) / size)
    angles = torch.arange(places)[:, None] * speeds
    cos, sin = angles.cos(), angles.sin()
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


class CausalLayer(nn.Module):
    """Attention to the past, then a feed-forward network; norms before both, no biases."""

    def __init__(self, width: int, hidden: int, heads: int, gain: float) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width, EPSILON), nn.LayerNorm(width, EPSILON)
        self.q, self.k, self.v = (matrix(width, width) for _ in range(3))
        self.out = matrix(width, width, gain)
        self.up, self.down = matrix(hidden, width), matrix(width, hidden, gain)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """Return the layer's output for (batch, places, width)."""
        batch, places, width = x.shape
        h = self.ln1(x)
        q, k, v = (
            functional.linear(h, one).view(batch, places, self.heads, -1).transpose(1, 2)
            for one in (self.q, self.k, self.v)
        )
        h = functional.scaled_dot_product_attention(rotate(q), rotate(k), v, attn_mask=mask)
        x = x + functional.linear(h.transpose(1, 2).reshape(batch, places, width), self.out)
        h = functional.gelu(functional.linear(self.ln2(x), self.up), approximate="tanh")
        return x + functional.linear(h, self.down)


class Residual(nn.Module):
    """Two convolutions, added to their input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(channels, channels // 2, 3)
        self.second = nn.Conv1d(channels // 2, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return the unit's output for (batch, channels, time)."""
        h = self.first(functional.pad(functional.elu(x), (2, 0)))
        return x + self.second(functional.elu(h))


class Decoder(nn.Module):
    """Latents in, samples out."""

    def __init__(self, config: CodecConfig) -> None:
        super().__init__()
        width = config.width
        self.config = config
        self.quant_out = matrix(width, config.latent)
        self.upsample = nn.Parameter(torch.randn(width, 1, 2 * STEPS) * 0.5)
        self.layers = nn.ModuleList(
            CausalLayer(width, config.hidden, config.heads, 0.5) for _ in range(config.layers)
        )
        self.conv_in = nn.Conv1d(width, config.channels[0], 3)
        self.scales = nn.ModuleList(
            nn.ConvTranspose1d(wide, narrow, 2 * ratio, ratio)
            for (wide, narrow), ratio in zip(pairwise(config.channels), RATIOS, strict=True)
        )
        self.residuals = nn.ModuleList(Residual(channels) for channels in config.channels[1:])
        self.conv_out = nn.Conv1d(config.channels[-1], 1, 7)

    def forward(self, latents: Tensor) -> Tensor:
        """Return (batch, samples) of (batch, frames, latent)."""
        x = functional.linear(latents, self.quant_out).transpose(1, 2)
        x = functional.conv_transpose1d(x, self.upsample, stride=STEPS, groups=self.config.width)
        x = x[..., : latents.shape[1] * STEPS].transpose(1, 2)
        places = torch.arange(x.shape[1])
        back = places[:, None] - places
        mask = (back >= 0) & (back < CONTEXT)
        for layer in self.layers:
            x = layer(x, mask)
        x = self.conv_in(functional.pad(x.transpose(1, 2), (2, 0)))
        for scale, residual, ratio in zip(self.scales, self.residuals, RATIOS, strict=True):
            x = residual(scale(functional.elu(x))[..., : x.shape[-1] * ratio])
        return self.conv_out(functional.pad(functional.elu(x), (6, 0)))[:, 0]


class Encoder(nn.Module):
    """Samples in, latents out; for the training alone."""

    def __init__(self, config: CodecConfig, hidden: int = 128) -> None:
        super().__init__()
        self.mel = LogMel(1024, STEP, config.bands)
        self.near = nn.Conv1d(config.bands, hidden, 5, padding=2)
        self.frames = nn.Conv1d(hidden, 2 * hidden, 3 * STEPS, STEPS, padding=STEPS)
        self.last = nn.Linear(2 * hidden, config.latent)

    def forward(self, samples: Tensor) -> Tensor:
        """Return (batch, frames, latent) of (batch, samples)."""
        h = (self.mel(samples)[..., : samples.shape[1] // STEP] + 3) / 2
        h = functional.gelu(self.frames(functional.gelu(self.near(h))))
        return functional.layer_norm(self.last(h.transpose(1, 2)), (self.last.out_features,))


class LogMel(nn.Module):
    """A spectrogram in bands: (batch, bands, frames) of decimal logarithms."""

    def __init__(self, window: int, hop: int, bands: int) -> None:
        super().__init__()
        self.size, self.hop = window, hop
        self.register_buffer("window", torch.hann_window(window), persistent=False)
        edges = 700 * (10 ** (torch.linspace(0, mel(RATE / 2), bands + 2) / 2595) - 1)
        frequencies = torch.arange(window // 2 + 1) * RATE / window
        rising = (frequencies - edges[:-2, None]) / (edges[1:-1] - edges[:-2])[:, None]
        falling = (edges[2:, None] - frequencies) / (edges[2:] - edges[1:-1])[:, None]
        filters = torch.minimum(rising, falling).clamp(min=0)
        filters = filters / filters.sum(1, keepdim=True).clamp(min=1e-3)
        self.register_buffer("filters", filters, persistent=False)

    def spectrum(self, samples: Tensor) -> Tensor:
        """Return magnitudes, (batch, frequencies, frames)."""
        made = torch.stft(
            samples, self.size, self.hop, window=self.window, pad_mode="constant",
            return_complex=True,
        )  # fmt: skip
        return (made.real.square() + made.imag.square() + 1e-9).sqrt()

    def forward(self, samples: Tensor) -> Tensor:
        """Return the logarithms."""
        return torch.log10(self.filters @ self.spectrum(samples) + 1e-3)


def mel(hertz: float) -> float:
    """Return a frequency on the scale of mel."""
    return 2595 * math.log10(1 + hertz / 700)
