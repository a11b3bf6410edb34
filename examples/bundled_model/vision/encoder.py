"""The eyes: a small vision transformer and the two matrices that follow it.

It computes what libmtmd computes for the projector type ``mlp``: every patch of
the picture becomes one token of the language model.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.bundled_model.blocks import Layer, matrix, zeros

EPSILON = 1e-6


@dataclass(frozen=True)
class EyesConfig:
    """The sizes. Every row of a matrix is a multiple of 32, as Q8_0 wants."""

    size: int = 64
    patch: int = 16
    width: int = 128
    layers: int = 5
    heads: int = 4
    hidden: int = 256
    projector: int = 256
    text_width: int = 192

    @property
    def tokens(self) -> int:
        """The number of tokens of a picture."""
        return (self.size // self.patch) ** 2


class Eyes(nn.Module):
    """Pictures in, embeddings for the language model out."""

    def __init__(self, config: EyesConfig) -> None:
        super().__init__()
        self.config = config
        width, gain = config.width, (2 * config.layers) ** -0.5
        self.patches = matrix(width, 3 * config.patch**2)
        self.patches_bias = zeros(width)
        self.positions = nn.Parameter(torch.randn(config.tokens, width) * 0.1)
        self.layers = nn.ModuleList(
            Layer(width, config.hidden, config.heads, gain, "tanh") for _ in range(config.layers)
        )
        self.post_weight, self.post_bias = nn.Parameter(torch.ones(width)), zeros(width)
        self.first, self.first_bias = matrix(config.projector, width), zeros(config.projector)
        self.second = matrix(config.text_width, config.projector, 0.3)
        self.second_bias = zeros(config.text_width)

    def features(self, pictures: Tensor) -> Tensor:
        """Return what the transformer makes of (batch, 3, size, size), by patch."""
        side = self.config.patch
        patches = functional.unfold(pictures, side, stride=side).transpose(1, 2)
        x = functional.linear(patches, self.patches, self.patches_bias) + self.positions
        for layer in self.layers:
            x = layer(x, EPSILON)
        return functional.layer_norm(
            x, (self.config.width,), self.post_weight, self.post_bias, EPSILON
        )

    def project(self, features: Tensor) -> Tensor:
        """Return the embeddings for the language model."""
        h = functional.linear(features, self.first, self.first_bias)
        return functional.linear(
            functional.gelu(h, approximate="tanh"), self.second, self.second_bias
        )

    def forward(self, pictures: Tensor) -> Tensor:
        """Return (batch, tokens, text width)."""
        return self.project(self.features(pictures))
