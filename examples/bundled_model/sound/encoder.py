"""The ears: three convolutions, a small transformer, and the two matrices that follow it.

It computes what libmtmd computes for the projector type ``qwen3a``: a second of sound
becomes 13 tokens of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.bundled_model.blocks import Layer, matrix, zeros
from examples.bundled_model.sound.mel import CHUNK

EPSILON = 1e-5
#: Tokens of one second.
PER_CHUNK = 13


@dataclass(frozen=True)
class EarsConfig:
    """The sizes. Every row of a matrix is a multiple of 32, as Q8_0 wants."""

    bands: int = 40
    channels: int = 32
    width: int = 128
    layers: int = 4
    heads: int = 4
    hidden: int = 256
    projector: int = 128
    text_width: int = 192


class Ears(nn.Module):
    """Spectrograms in, embeddings for the language model out."""

    def __init__(self, config: EarsConfig) -> None:
        super().__init__()
        self.config = config
        width, channels, gain = config.width, config.channels, (2 * config.layers) ** -0.5
        self.convolutions = nn.ModuleList(
            nn.Conv2d(inputs, channels, 3, 2, 1) for inputs in (1, channels, channels)
        )
        self.conv_out = matrix(width, channels * config.bands // 8)
        self.positions = nn.Parameter(torch.randn(PER_CHUNK, width) * 0.1)
        self.layers = nn.ModuleList(
            Layer(width, config.hidden, config.heads, gain, "none") for _ in range(config.layers)
        )
        self.post_weight, self.post_bias = nn.Parameter(torch.ones(width)), zeros(width)
        self.first, self.first_bias = matrix(config.projector, width), zeros(config.projector)
        self.second = matrix(config.text_width, config.projector, 0.3)
        self.second_bias = zeros(config.text_width)

    def features(self, mels: Tensor, seconds: Tensor) -> Tensor:
        """Return the transformer's output for (batch, bands, frames), each `seconds` long."""
        batch, bands, frames = mels.shape
        chunks = frames // CHUNK
        x = mels.view(batch, bands, chunks, CHUNK).transpose(1, 2)
        x = x.reshape(batch * chunks, 1, bands, CHUNK)
        for convolution in self.convolutions:
            x = functional.gelu(convolution(x))
        x = x.permute(0, 3, 1, 2).flatten(2)  # by time: channel by channel, then frequency
        x = functional.linear(x, self.conv_out) + self.positions
        x = x.view(batch, chunks * PER_CHUNK, self.config.width)
        places = torch.arange(chunks * PER_CHUNK)
        mask = (places[None] < seconds[:, None] * PER_CHUNK)[:, None, None]
        for layer in self.layers:
            x = layer(x, EPSILON, mask)
        return functional.layer_norm(
            x, (self.config.width,), self.post_weight, self.post_bias, EPSILON
        )

    def project(self, features: Tensor) -> Tensor:
        """Return the embeddings for the language model."""
        h = functional.gelu(functional.linear(features, self.first, self.first_bias))
        return functional.linear(h, self.second, self.second_bias)

    def forward(self, mels: Tensor, seconds: Tensor) -> Tensor:
        """Return (batch, tokens, text width); those behind the end of a recording mean nothing."""
        return self.project(self.features(mels, seconds))
