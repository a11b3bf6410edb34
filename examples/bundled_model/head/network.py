"""The head: one layer that reads a token and a row of the model, as llama.cpp's `eagle3` does.

Cell i reads token i + 1, and guesses token i + 2. Its row comes from the model's layers at token i.
While a draft is made, the model has not yet computed that token: then the row is what the layer
gave at cell i - 1. Training does the same, `depth` tokens far ("training-time test" of EAGLE-3,
arXiv:2503.01840)::

    depth 1   row of the model at i          sees the cells up to i
    depth 2   output of depth 1 at i - 1     sees those up to i - 1, and itself
    depth 3   output of depth 2 at i - 1     sees those up to i - 2, depth 2 at i - 1, and itself
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import gguf
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.bundled_model.head import layers_of
from examples.bundled_model.model import rotate


@dataclass(frozen=True)
class Shape:
    """The sizes of the model and of its head, which reads the input of the layers `read`."""

    width: int
    heads: int
    kv_heads: int
    hidden: int
    layers: int
    context: int
    rope_base: float
    epsilon: float
    vocab: int
    read: tuple[int, ...]

    @property
    def head_width(self) -> int:
        """The width of one attention head."""
        return self.width // self.heads


class Target:
    """The parts of a model that a head begins with: sizes, embeddings, and the last layer."""

    def __init__(self, path: Path) -> None:
        self.reader = gguf.GGUFReader(path)
        self._tensors = {tensor.name: tensor for tensor in self.reader.tensors}
        self.embedding = self.tensor("token_embd.weight")

        def number(key: str) -> float:
            value: float = self.reader.get_field(f"llama.{key}").contents()
            return value

        self.shape = Shape(
            width=int(number("embedding_length")),
            heads=int(number("attention.head_count")),
            kv_heads=int(number("attention.head_count_kv")),
            hidden=int(number("feed_forward_length")),
            layers=int(number("block_count")),
            context=int(number("context_length")),
            rope_base=number("rope.freq_base"),
            epsilon=number("attention.layer_norm_rms_epsilon"),
            vocab=len(self.embedding),
            read=layers_of(int(number("block_count"))),
        )

    def tensor(self, name: str) -> Tensor:
        """Return a tensor as float32."""
        found = self._tensors[name]
        return torch.tensor(gguf.quants.dequantize(found.data, found.tensor_type))

    @property
    def output(self) -> Tensor:
        """The matrix that gives the logits."""
        return self.tensor("output.weight") if "output.weight" in self._tensors else self.embedding


def halves(weight: Tensor, heads: int) -> Tensor:
    """Reorder the rows of each attention head from llama.cpp's pairs to two halves."""
    rows, columns = weight.shape
    return weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


class Eagle(nn.Module):
    """The head of a model. It begins as a copy of the model's last layer.

    Args:
        target: the model.
        known: the tokens that the head may guess, ascending.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, target: Target, known: Tensor) -> None:
        super().__init__()
        self.shape = shape = target.shape
        self.register_buffer("known", known)
        self.register_buffer("embedding", target.embedding, persistent=False)
        self.register_buffer("output", target.output[known], persistent=False)
        half = shape.head_width // 2
        rates = shape.rope_base ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(2048, dtype=torch.float64), rates)
        self.register_buffer("cos", angles.cos().float(), persistent=False)
        self.register_buffer("sin", angles.sin().float(), persistent=False)

        def last(name: str) -> Tensor:
            return target.tensor(f"blk.{shape.layers - 1}.{name}.weight")

        def wide(matrix: Tensor) -> nn.Parameter:
            of_token = torch.randn_like(matrix) * matrix.std()
            return nn.Parameter(torch.cat((of_token, matrix), dim=1))

        width = shape.width
        rows = [0.02 * torch.randn(width, width) / math.sqrt(width) for _ in shape.read[:-1]]
        self.fc = nn.Parameter(torch.cat((*rows, torch.eye(width)), dim=1))
        self.token_norm = nn.Parameter(torch.ones(width))
        self.row_norm = nn.Parameter(last("attn_norm"))
        self.ffn_norm = nn.Parameter(last("ffn_norm"))
        self.output_norm = nn.Parameter(target.tensor("output_norm.weight"))
        self.q = wide(halves(last("attn_q"), shape.heads))
        self.k = wide(halves(last("attn_k"), shape.kv_heads))
        self.v = wide(last("attn_v"))
        self.o = nn.Parameter(last("attn_output"))
        self.gate = nn.Parameter(last("ffn_gate"))
        self.up = nn.Parameter(last("ffn_up"))
        self.down = nn.Parameter(last("ffn_down"))

    def matrices(self) -> list[nn.Parameter]:
        """The weights that are matrices."""
        return [self.fc, self.q, self.k, self.v, self.o, self.gate, self.up, self.down]

    def norms(self) -> list[nn.Parameter]:
        """The weights of the norms."""
        return [self.token_norm, self.row_norm, self.ffn_norm, self.output_norm]

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], weight, self.shape.epsilon)

    def forward(self, tokens: Tensor, features: Tensor, depth: int) -> Iterator[Tensor]:
        """Yield the output of each depth, before the last norm: (rows, cells, width).

        Args:
            tokens: (rows, cells), token i + 1 at cell i.
            features: (rows, cells, layers x width), the model's at token i.
            depth: how many tokens are guessed in a row.
        """
        words = self._norm(functional.embedding(tokens, self.embedding), self.token_norm)
        rows = functional.linear(features, self.fc)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        for _ in range(depth):
            q, k, v = self._project(words, rows)
            keys.append(k)
            values.append(v)
            seen = self._first(q, k, v) if len(keys) == 1 else self._further(q, keys, values)
            x = rows + functional.linear(seen, self.o)
            h = self._norm(x, self.ffn_norm)
            gate, up = functional.linear(h, self.gate), functional.linear(h, self.up)
            x = x + functional.linear(functional.silu(gate) * up, self.down)
            yield x
            rows = _later(x, 1)

    def logits(self, x: Tensor) -> Tensor:
        """Return the scores of the tokens that the head knows."""
        return functional.linear(self._norm(x, self.output_norm), self.output)

    def _project(self, words: Tensor, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return queries, keys and values: (rows, heads, cells, head_width)."""
        shape = self.shape
        both = torch.cat((words, self._norm(rows, self.row_norm)), dim=-1)
        n_rows, length, _ = both.shape
        cos, sin = self.cos[:length], self.sin[:length]

        def split(weight: Tensor, heads: int) -> Tensor:
            projected = functional.linear(both, weight)
            return projected.view(n_rows, length, heads, shape.head_width).transpose(1, 2)

        def repeated(x: Tensor) -> Tensor:
            return x.repeat_interleave(shape.heads // shape.kv_heads, dim=1)

        q = rotate(split(self.q, shape.heads), cos, sin)
        k = rotate(split(self.k, shape.kv_heads), cos, sin)
        return q, repeated(k), repeated(split(self.v, shape.kv_heads))

    @staticmethod
    def _joined(seen: Tensor) -> Tensor:
        return seen.transpose(1, 2).flatten(2)

    def _first(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self._joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True))

    def _further(self, q: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """Attend to the cells of the model, then to a cell of each depth since."""
        depth, length = len(keys), q.shape[2]
        scale = self.shape.head_width**-0.5
        hidden = torch.ones(length, length, dtype=torch.bool).triu(2 - depth)
        scores = (q @ keys[0].mT * scale).masked_fill(hidden, -1e9)
        own = [
            (q * _later(keys[m], depth - 1 - m, dim=2)).sum(-1, keepdim=True) * scale
            for m in range(1, depth)
        ]
        weights = torch.cat((scores, *own), dim=-1).softmax(-1)
        seen = weights[..., :length] @ values[0]
        for m in range(1, depth):
            column = weights[..., length + m - 1 : length + m]
            seen = seen + column * _later(values[m], depth - 1 - m, dim=2)
        return self._joined(seen)


def _later(x: Tensor, count: int, dim: int = 1) -> Tensor:
    """Move cells to the right; those that come in are zeros."""
    if not count:
        return x
    kept = x.narrow(dim, 0, x.shape[dim] - count)
    return torch.cat((torch.zeros_like(x.narrow(dim, 0, count)), kept), dim=dim)
