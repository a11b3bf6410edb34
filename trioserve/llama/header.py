"""What llama.cpp takes for granted in the header of a GGUF file.

llama.cpp ends the process where such a value is wrong, so `check` looks at them first. What it does
not know of, such as the values of single architectures, it lets pass.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from pathlib import Path

from trioserve.errors import ModelLoadError
from trioserve.models import gguf
from trioserve.models.gguf import Header

_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # llama.cpp's
_MAX_SIZE = 2**31 - 1
_MAX_EPSILON = 1.0
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_TOKENS = "tokenizer.ggml.tokens"


def check(path: Path, overridden: Collection[str] = ()) -> None:
    """Refuse values that would end the process when the model is loaded or used.

    A file whose header cannot be read is not refused: llama.cpp says what is wrong with it.

    Args:
        path: of the file.
        overridden: keys whose values are not used.

    Raises:
        ModelLoadError: there is such a value; the message names it.
    """
    try:
        with gguf.read(path) as header:
            problems = list(_problems(header, header.text("general.architecture")))
    except ModelLoadError:
        return
    for key, problem in problems:
        if key not in overridden:
            raise ModelLoadError(f"The model file {path} cannot be used: {key} {problem}.")


def _problems(header: Header, arch: str) -> Iterator[tuple[str, str]]:
    for key in header:
        values = header.numbers(key) if key.startswith(f"{arch}.") else []
        if not all(map(math.isfinite, values)):
            yield key, "is not finite"
        if key.endswith("_epsilon") and not all(0 <= value <= _MAX_EPSILON for value in values):
            yield key, f"is {values[0]}, and should be small and positive"
    yield from _sizes(header, arch)
    yield from _heads(header, arch)
    yield from _experts(header, arch)
    yield from _vocabulary(header)


def _sizes(header: Header, arch: str) -> Iterator[tuple[str, str]]:
    for name, most in (
        ("block_count", _MAX_LAYERS),
        ("context_length", _MAX_SIZE),
        ("embedding_length", _MAX_SIZE),
    ):
        key = f"{arch}.{name}"
        for value in header.numbers(key):
            if not 1 <= value <= most:
                yield key, f"is {value}, and should be between 1 and {most}"
    layers = header.numbers(f"{arch}.block_count")
    key = f"{arch}.nextn_predict_layers"
    if layers and any(value > layers[0] for value in header.numbers(key)):
        yield key, f"is more than the {layers[0]} layers"
    key = f"{arch}.rope.scaling.type"
    if key in header and header.text(key) not in _ROPE_SCALINGS:
        yield key, f"is {header.text(key)!r}, and should be one of {', '.join(_ROPE_SCALINGS)}"
    for name in ("rope.freq_base", "rope.scaling.factor", "rope.freq_base_swa"):
        key = f"{arch}.{name}"
        if any(value <= 0 for value in header.numbers(key)):
            yield key, "is not positive"


def _heads(header: Header, arch: str) -> Iterator[tuple[str, str]]:
    layers = max(header.numbers(f"{arch}.block_count"), default=0)
    key, kv_key = f"{arch}.attention.head_count", f"{arch}.attention.head_count_kv"
    counts, kv_counts = header.numbers(key), header.numbers(kv_key)
    for name, values in ((key, counts), (kv_key, kv_counts)):
        if any(not 0 <= value <= _MAX_SIZE for value in values):
            yield name, "is out of range"
        elif len(values) == 1 and not values[0] and name == key and not layers:
            yield name, "is 0"
    kv_counts = kv_counts or counts
    if len(counts) == 1:
        counts *= len(kv_counts)
    if len(kv_counts) == 1:
        kv_counts *= len(counts)
    for heads, kv in zip(counts, kv_counts, strict=False):
        if kv and heads % kv:
            yield kv_key, f"is {kv}, which does not divide the {heads} heads"
    width = header.numbers(f"{arch}.embedding_length")
    sized = header.numbers(f"{arch}.attention.key_length")
    if width and counts and counts[0] and not sized and width[0] % counts[0]:
        yield key, f"is {counts[0]}, which does not divide the width of {width[0]}"


def _experts(header: Header, arch: str) -> Iterator[tuple[str, str]]:
    key, used_key = f"{arch}.expert_count", f"{arch}.expert_used_count"
    n, n_used = max(header.numbers(key), default=0), max(header.numbers(used_key), default=0)
    if not 0 <= n <= _MAX_EXPERTS:
        yield key, f"is {n}, and should be at most {_MAX_EXPERTS}"
    if not (1 if n else 0) <= n_used <= n:
        yield used_key, f"is {n_used}, with {n} experts"
    key, used_key = f"{arch}.expert_group_count", f"{arch}.expert_group_used_count"
    groups, n_used = max(header.numbers(key), default=0), max(header.numbers(used_key), default=0)
    if groups > 0 and (groups >= n or n % groups):
        yield key, f"is {groups}, with {n} experts"
    if groups > 1 and not 0 < n_used < groups:
        yield used_key, f"is {n_used}, with {groups} groups"


def _vocabulary(header: Header) -> Iterator[tuple[str, str]]:
    tokens = header.texts(_TOKENS)
    if tokens is None:
        return
    if not tokens:
        yield _TOKENS, "is empty"
    named = [token for token in tokens if token]  # llama.cpp gives the others a name
    if len(set(named)) < len(named):
        yield _TOKENS, "has the same token twice"
