"""`Shape`: how large the parts of a model are, by the header of its file.

llama.cpp takes some of this from the names of architectures. What is not known here counts as what
takes more memory.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import attrs

from trioserve.errors import ModelLoadError
from trioserve.models import gguf
from trioserve.models.gguf import Header
from trioserve.whole_numbers import whole_number

MAX_LAYERS = 512  # llama.cpp's
_MAX_CONTEXT = 2**31 - 256  # in whole steps of a KV cache
#: No size is larger. The product of a few of these is a finite number.
_MOST = 2.0**48
_LAYER = re.compile(rb"blk\.(\d+)\.(.+)")
_EXPERTS = re.compile(rb"ffn_(up|down|gate|gate_up)_(ch|)exps.*")
_DENSE = re.compile(rb"ffn_(up|down|gate)\..*")
_STATE = re.compile(rb"(ssm_|shortconv\.|time_mix_).*")
_KEYS = (b"attn_k.weight", b"attn_qkv.weight", b"attn_kv_a_mqa.weight", b"attn_kv_a.weight")
_EMBEDDING, _OUTPUT = b"token_embd.weight", b"output.weight"

#: Every how many layers one sees the whole text, where the file does not say.
_PATTERNS = {
    "afmoe": 4, "cohere2": 4, "cohere2moe": 4, "exaone-moe": 4, "exaone4": 4, "gemma-embedding": 6,
    "gemma2": 2, "gemma3": 6, "gemma3n": 5, "gpt-oss": 2, "laguna": 4, "mellum": 4, "olmo2": 4,
    "plamo3": 8, "smallthinker": 4,
}  # fmt: skip
#: In these, the first layer of each group sees it, and in the others the last.
_DENSE_FIRST = ("cohere2moe", "laguna", "smallthinker")


@attrs.frozen(kw_only=True)
class Layer:
    """A layer: bytes of its tensors, and what it adds to the memory of a sequence."""

    weights: int = 0
    experts: int = 0  # of these bytes
    dense: int = 0
    key: int = 0  # values in a cell
    value: int = 0
    state: int = 0  # bytes for each sequence
    is_windowed: bool = False


@attrs.frozen(kw_only=True)
class Shape:
    """A model. Sizes are in bytes, widths in values.

    `embedding` is always in RAM, and `output` follows the last layer; where the file has one
    tensor for both, `is_tied`. `activations` is how many values a token takes in a layer.
    """

    arch: str
    n_ctx_train: int
    n_vocab: int
    n_embd: int
    n_heads: int
    activations: int
    window: int
    layers: tuple[Layer, ...]
    embedding: int
    output: int
    is_tied: bool
    #: All layers with keys and values have the same number of heads.
    is_even: bool = True
    #: The positions are a table, which no RoPE scaling stretches.
    has_positions: bool = False
    is_causal: bool = True

    @property
    def weights(self) -> int:
        """All tensors of the file."""
        return self.embedding + self.output + sum(one.weights for one in self.layers)

    @property
    def has_state(self) -> bool:
        """True for recurrent models and for hybrids."""
        return any(one.state for one in self.layers)

    @property
    def has_cache(self) -> bool:
        """True if any layer keeps keys and values."""
        return any(one.key for one in self.layers)


_NONE: Mapping[str, str] = MappingProxyType({})


def read_shape(path: Path, overridden: Mapping[str, str] = _NONE) -> Shape | None:
    """Read the shape of a model from the headers of its files; None if one cannot be read.

    Args:
        path: of the first file.
        overridden: values that are used in place of those in the file, by their keys.
    """
    stats = tuple((part, *gguf.version_of(part)) for part in gguf.parts_of(path))
    return _read(stats, tuple(overridden.items()))


@lru_cache(maxsize=4)  # a model is measured before it is loaded
def _read(
    files: tuple[tuple[Any, ...], ...], overridden: tuple[tuple[str, str], ...]
) -> Shape | None:
    try:
        with ExitStack() as opened:
            headers = [opened.enter_context(gguf.read(path)) for path, *_ in files]
            sizes = [path.stat().st_size for path, *_ in files]
            return _measure(list(zip(headers, sizes, strict=True)), dict(overridden))
    except (ModelLoadError, OSError):
        return None


def _measure(files: Sequence[tuple[Header, int]], overridden: Mapping[str, str]) -> Shape:
    first = files[0][0]
    keys = _Keys(first, overridden)
    sizes: dict[bytes, int] = {}
    shapes: dict[bytes, tuple[int, ...]] = {}
    for header, size in files:
        found = sorted(header.tensors(), key=lambda one: one.offset)
        room = max(0, size - header.data_start())
        ends = [*(one.offset for one in found[1:]), room]
        for one, end in zip(found, ends, strict=False):  # a file may have none
            sizes[one.name] = max(0, min(end, room) - one.offset)
            shapes[one.name] = one.shape
    n_layers = min(int(keys.number("block_count")), MAX_LAYERS)
    by_layer: defaultdict[int, dict[bytes, int]] = defaultdict(dict)
    rest = 0
    for name, size in sizes.items():
        match = _LAYER.fullmatch(name)
        layer = None if match is None else whole_number(match[1], most=n_layers - 1)
        if match is not None and layer is not None:
            by_layer[layer][match[2]] = size
        elif name != _EMBEDDING:
            rest += size
    n_embd = int(keys.number("embedding_length"))
    heads = keys.numbers("attention.head_count")
    return Shape(
        arch=keys.arch,
        n_ctx_train=min(int(keys.number("context_length")), _MAX_CONTEXT),
        n_vocab=first.count("tokenizer.ggml.tokens") or _n_vocab(shapes),
        n_embd=n_embd,
        n_heads=int(max(heads, default=0)),
        activations=_activations(keys, n_embd),
        window=int(keys.number("attention.sliding_window")),
        layers=tuple(_layers(keys, by_layer, n_layers)),
        embedding=sizes.get(_EMBEDDING, 0),
        output=rest,
        is_tied=_OUTPUT not in sizes,
        is_even=len(keys.numbers("attention.head_count_kv")) <= 1,
        has_positions=b"position_embd.weight" in sizes,
        is_causal=keys.text("attention.causal") != "false",
    )


class _Keys:
    """The entries of a header that begin with the architecture, with their replacements."""

    def __init__(self, header: Header, overridden: Mapping[str, str]) -> None:
        self._header = header
        self._overridden = overridden
        self.arch = overridden.get("general.architecture") or header.text("general.architecture")

    def numbers(self, name: str) -> list[float]:
        key = f"{self.arch}.{name}"
        if (text := self._overridden.get(key)) is None:
            return [_bounded(value) for value in self._header.numbers(key)]
        try:
            return [_bounded(float(text))]
        except ValueError:
            return []

    def number(self, name: str) -> float:
        return max(self.numbers(name), default=0)

    def text(self, name: str) -> str:
        key = f"{self.arch}.{name}"
        found = self._overridden.get(key)
        if found is None and self._header.numbers(key) == [0]:
            return "false"
        return found or ""


def _bounded(value: float) -> float:
    return max(-_MOST, min(value, _MOST)) if math.isfinite(value) else 0.0


def _n_vocab(shapes: Mapping[bytes, tuple[int, ...]]) -> int:
    shape = shapes.get(_EMBEDDING, ())
    return shape[1] if len(shape) > 1 else 0


def _activations(keys: _Keys, n_embd: int) -> int:
    wide = keys.number("feed_forward_length")
    used = keys.number("expert_used_count")
    if used:
        of_experts = used * (2 * keys.number("expert_feed_forward_length") + n_embd)
        wide = max(wide, of_experts / 2)
    inner = keys.number("ssm.inner_size")
    return int(2 * max(wide, 2 * inner) + 7 * n_embd)


def _layers(
    keys: _Keys, by_layer: Mapping[int, Mapping[bytes, int]], n_layers: int
) -> Iterator[Layer]:
    is_windowed = list(_windows(keys, n_layers))
    width = keys.number("embedding_length")
    heads = keys.numbers("attention.head_count") or [0]
    kv_heads = keys.numbers("attention.head_count_kv") or heads
    key, value = (keys.number(f"attention.{name}_length") for name in ("key", "value"))
    state = _state(keys, max(heads))
    is_latent = keys.number("attention.kv_lora_rank") > 0
    for i in range(n_layers):
        tensors = by_layer.get(i, {})
        n_heads = kv_heads[i] if i < len(kv_heads) > 1 else kv_heads[0]
        of_head = width / max(1, max(heads))
        has_state = any(_STATE.fullmatch(name) for name in tensors)
        has_keys = any(name in tensors for name in _KEYS) and not (
            has_state and b"attn_output.weight" not in tensors
        )
        if is_latent and b"attn_k_b.weight" in tensors:
            n_heads, wide_value = 1, 0.0
        else:
            wide_value = value or of_head
        yield Layer(
            weights=sum(tensors.values()),
            experts=sum(size for name, size in tensors.items() if _EXPERTS.fullmatch(name)),
            dense=sum(size for name, size in tensors.items() if _DENSE.fullmatch(name)),
            key=int(n_heads * (key or of_head)) if has_keys else 0,
            value=int(n_heads * wide_value) if has_keys else 0,
            state=state if has_state else 0,
            is_windowed=has_keys and is_windowed[i],
        )


def _windows(keys: _Keys, n_layers: int) -> Iterator[bool]:
    given = keys.numbers("attention.sliding_window_pattern")
    pattern = int(given[0]) if len(given) == 1 else _PATTERNS.get(keys.arch, 0)
    has_window = keys.number("attention.sliding_window") > 0
    for i in range(n_layers):
        if len(given) > 1:
            yield has_window and i < len(given) and bool(given[i])
        elif not has_window or pattern < 1 or keys.arch not in _PATTERNS:
            yield False
        elif keys.arch in _DENSE_FIRST:
            yield i % pattern != 0
        else:
            yield i % pattern < pattern - 1


def _state(keys: _Keys, n_heads: float) -> int:
    """Compute the bytes of a recurrent layer's state, as llama.cpp's `n_embd_r` and `n_embd_s`."""
    n_embd = keys.number("embedding_length")
    if (size := keys.number("wkv.head_size")) > 0:
        values = (keys.number("token_shift_count") or 2) * n_embd + n_embd * size
    elif (cells := keys.number("shortconv.l_cache")) > 0:
        values = n_embd * (cells - 1)
    elif (size := keys.number("kda.head_dim")) > 0:
        values = 3 * max(0, keys.number("ssm.conv_kernel") - 1) * n_heads * size
        values += size * size * n_heads
    else:
        inner, states = keys.number("ssm.inner_size"), keys.number("ssm.state_size")
        convolved = inner + 2 * keys.number("ssm.group_count") * states
        values = max(0, keys.number("ssm.conv_kernel") - 1) * convolved + states * inner
    return int(values) * 4
