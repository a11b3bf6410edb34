"""The transformer layers that the eyes and the ears are made of, as libmtmd computes them."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


def matrix(rows: int, columns: int, gain: float = 1.0) -> nn.Parameter:
    """Return random weights of a linear map."""
    return nn.Parameter(torch.randn(rows, columns) * (gain / math.sqrt(columns)))


def zeros(size: int) -> nn.Parameter:
    """Return a bias, or what a norm adds."""
    return nn.Parameter(torch.zeros(size))


class Layer(nn.Module):
    """Attention among all places, then a feed-forward network; norms before both."""

    def __init__(self, width: int, hidden: int, heads: int, gain: float, gelu: str) -> None:
        super().__init__()
        self.heads, self.gelu = heads, gelu
        self.ln1_weight, self.ln1_bias = nn.Parameter(torch.ones(width)), zeros(width)
        self.ln2_weight, self.ln2_bias = nn.Parameter(torch.ones(width)), zeros(width)
        self.q, self.q_bias = matrix(width, width), zeros(width)
        self.k, self.k_bias = matrix(width, width), zeros(width)
        self.v, self.v_bias = matrix(width, width), zeros(width)
        self.out, self.out_bias = matrix(width, width, gain), zeros(width)
        self.up, self.up_bias = matrix(hidden, width), zeros(hidden)
        self.down, self.down_bias = matrix(width, hidden, gain), zeros(width)

    def forward(self, x: Tensor, eps: float, mask: Tensor | None = None) -> Tensor:
        """Return the residual stream after this layer. ``mask`` is true where one may look."""
        batch, length, width = x.shape
        h = functional.layer_norm(x, (width,), self.ln1_weight, self.ln1_bias, eps)
        qkv = functional.linear(
            h,
            torch.cat((self.q, self.k, self.v)),
            torch.cat((self.q_bias, self.k_bias, self.v_bias)),
        )
        q, k, v = qkv.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + functional.linear(
            y.transpose(1, 2).reshape(batch, length, width), self.out, self.out_bias
        )
        h = functional.layer_norm(x, (width,), self.ln2_weight, self.ln2_bias, eps)
        h = functional.gelu(functional.linear(h, self.up, self.up_bias), approximate=self.gelu)
        return x + functional.linear(h, self.down, self.down_bias)
