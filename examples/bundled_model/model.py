"""The network: a small Llama, written for training on a CPU."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional


@dataclass(frozen=True)
class Config:
    """The sizes. Every row of a matrix is a multiple of 32, as Q8_0 wants."""

    vocab: int = 2048
    width: int = 192
    layers: int = 6
    heads: int = 6
    kv_heads: int = 3
    hidden: int = 384
    context: int = 4096
    rope_base: float = 10_000.0
    epsilon: float = 1e-5

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.width // self.heads


def rope_tables(config: Config, length: int) -> tuple[Tensor, Tensor]:
    """Return cosines and sines by position, for heads laid out as two halves."""
    half = config.head_width // 2
    rates = config.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
    angles = torch.outer(torch.arange(length, dtype=torch.float64), rates)
    return angles.cos().float(), angles.sin().float()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs (i, i + half). The export permutes rows to llama.cpp's order."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class Block(nn.Module):
    """One layer: attention, then a gated feed-forward network."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        width, kv_width = config.width, config.kv_heads * config.head_width
        self.attn_norm = nn.Parameter(torch.ones(width))
        self.ffn_norm = nn.Parameter(torch.ones(width))
        self.q = _matrix(width, width)
        self.k = _matrix(kv_width, width)
        self.v = _matrix(kv_width, width)
        self.o = _matrix(width, width, gain=1 / math.sqrt(2 * config.layers))
        self.gate = _matrix(config.hidden, width)
        self.up = _matrix(config.hidden, width)
        self.down = _matrix(width, config.hidden, gain=1 / math.sqrt(2 * config.layers))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Return the residual stream after this layer."""
        x = x + self._attend(
            functional.rms_norm(x, x.shape[-1:], self.attn_norm, self.eps), cos, sin
        )
        h = functional.rms_norm(x, x.shape[-1:], self.ffn_norm, self.eps)
        gate, up = functional.linear(h, torch.cat((self.gate, self.up))).chunk(2, dim=-1)
        return x + functional.linear(functional.silu(gate) * up, self.down)

    @property
    def eps(self) -> float:
        """The epsilon of the norms."""
        return self.config.epsilon

    def _attend(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        config = self.config
        batch, length, width = x.shape
        heads, kv_heads = config.heads, config.kv_heads
        qkv = functional.linear(x, torch.cat((self.q, self.k, self.v)))
        qkv = qkv.view(batch, length, heads + 2 * kv_heads, config.head_width).transpose(1, 2)
        qk = rotate(qkv[:, : heads + kv_heads], cos, sin)
        keys = qk[:, heads:].repeat_interleave(heads // kv_heads, dim=1)
        values = qkv[:, heads + kv_heads :].repeat_interleave(heads // kv_heads, dim=1)
        y = functional.scaled_dot_product_attention(qk[:, :heads], keys, values, is_causal=True)
        return functional.linear(y.transpose(1, 2).reshape(batch, length, width), self.o)


def _matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    return nn.Parameter(torch.randn(rows, columns) * (gain / math.sqrt(columns)))


class Llama(nn.Module):
    """Embeddings, layers and a last norm; the embeddings are the output matrix too."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Parameter(torch.randn(config.vocab, config.width) * 0.05)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.Parameter(torch.ones(config.width))
        cos, sin = rope_tables(config, config.context)
        self.register_buffer("cos", cos, persistent=False)
        self.register_buffer("sin", sin, persistent=False)

    def features(self, tokens: Tensor) -> Tensor:
        """Return the last layer's normalised output for a (batch, length) of ids."""
        return self.continued(functional.embedding(tokens, self.embedding))

    def continued(self, x: Tensor) -> Tensor:
        """Return the same for embeddings, (batch, length, width), of whatever kind."""
        length = x.shape[1]
        cos, sin = self.cos[:length], self.sin[:length]
        for block in self.blocks:
            x = block(x, cos, sin)
        return functional.rms_norm(x, x.shape[-1:], self.norm, self.config.epsilon)

    def logits(self, features: Tensor) -> Tensor:
        """Return the scores of the next token."""
        return functional.linear(features, self.embedding)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores at every position."""
        return self.logits(self.features(tokens))
