"""From text to latents: a transformer over tokens and frames, and what makes a frame of its output.

It computes what llama.cpp computes for the architecture ``pockettts``, and libmtmd for the flow
of ``pockettts_gen``. That flow takes a single step from noise to a latent. The latents of the
file are so large that the noise is small beside them; so the step is learned without noise.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.bundled_model.blocks import matrix, zeros
from examples.bundled_model.voice.codec import EPSILON, CausalLayer

FLOW_EPSILON = 1e-6
#: The latents of the file are those of the training, times this.
SCALE = 32.0


@dataclass(frozen=True)
class SpeakerConfig:
    """The sizes. Every row of a matrix is a multiple of 32, as Q8_0 wants."""

    rows: int
    latent: int
    width: int = 128
    hidden: int = 384
    heads: int = 4
    layers: int = 4
    flow: int = 128


class Flow(nn.Module):
    """One block and a last layer, both modulated by the transformer's output."""

    def __init__(self, config: SpeakerConfig) -> None:
        super().__init__()
        size = config.flow
        self.begin = nn.Parameter(torch.randn(size))
        self.condition, self.condition_bias = matrix(size, config.width), zeros(size)
        self.norm = nn.LayerNorm(size, FLOW_EPSILON)
        self.ada, self.ada_bias = matrix(3 * size, size), zeros(3 * size)
        self.up, self.up_bias = matrix(size, size), zeros(size)
        self.down, self.down_bias = matrix(size, size), zeros(size)
        self.last_ada, self.last_ada_bias = matrix(2 * size, size), zeros(2 * size)
        self.last, self.last_bias = matrix(config.latent, size), zeros(config.latent)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return a latent for each row."""
        y = functional.silu(functional.linear(hidden, self.condition, self.condition_bias))
        shift, scale, gate = functional.linear(y, self.ada, self.ada_bias).chunk(3, -1)
        h = self.norm(self.begin) * (1 + scale) + shift
        h = functional.silu(functional.linear(h, self.up, self.up_bias))
        x = self.begin + gate * functional.linear(h, self.down, self.down_bias)
        shift, scale = functional.linear(y, self.last_ada, self.last_ada_bias).chunk(2, -1)
        x = functional.layer_norm(x, x.shape[-1:], eps=FLOW_EPSILON) * (1 + scale) + shift
        return functional.linear(x, self.last, self.last_bias)


class Speaker(nn.Module):
    """Rows of tokens and frames in, latents and scores of the end out."""

    def __init__(self, config: SpeakerConfig) -> None:
        super().__init__()
        self.config = config
        gain = (2 * config.layers) ** -0.5
        self.frame = matrix(config.width, config.latent)
        self.layers = nn.ModuleList(
            CausalLayer(config.width, config.hidden, config.heads, gain)
            for _ in range(config.layers)
        )
        self.norm = nn.LayerNorm(config.width, EPSILON)
        self.end, self.end_bias = matrix(1, config.width), zeros(1)
        self.flow = Flow(config)

    def forward(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return latents and scores of (batch, places, width)."""
        mask = torch.ones(rows.shape[1], rows.shape[1], dtype=torch.bool).tril()
        for layer in self.layers:
            rows = layer(rows, mask)
        hidden = self.norm(rows)
        return self.flow(hidden), functional.linear(hidden, self.end, self.end_bias)[..., 0]
