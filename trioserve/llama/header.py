"""The header of a GGUF file, and what llama.cpp takes for granted in it.

llama.cpp ends the process where such a value is wrong, so `check` looks at them first. What it does
not know of, such as the values of single architectures, it lets pass.
"""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from trioserve.errors import ModelLoadError
from trioserve.llama import library
from trioserve.llama.library import lib

_MAX_LAYERS, _MAX_EXPERTS = 512, 1024  # llama.cpp's
_MAX_SIZE = 2**31 - 1
_MAX_EPSILON = 1.0
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_TOKENS = "tokenizer.ggml.tokens"
_BOOL, _STRING, _ARRAY = 7, 8, 9
#: GGUF's types of numbers, by their numbers in the file.
_NUMBERS: Mapping[int, Any] = {
    0: ctypes.c_uint8,
    1: ctypes.c_int8,
    2: ctypes.c_uint16,
    3: ctypes.c_int16,
    4: ctypes.c_uint32,
    5: ctypes.c_int32,
    6: ctypes.c_float,
    10: ctypes.c_uint64,
    11: ctypes.c_int64,
    12: ctypes.c_double,
}


class _Params(ctypes.Structure):
    """How `gguf_init_from_file` reads a file: the names of the tensors, but not their values."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


_POINTER, _INDEX = ctypes.c_void_p, ctypes.c_int64
_FUNCTIONS: Mapping[str, tuple[Any, tuple[Any, ...]]] = {
    "gguf_init_from_file": (_POINTER, (ctypes.c_char_p, _Params)),
    "gguf_free": (None, (_POINTER,)),
    "gguf_find_tensor": (_INDEX, (_POINTER, ctypes.c_char_p)),
    "gguf_get_n_kv": (_INDEX, (_POINTER,)),
    "gguf_get_key": (ctypes.c_char_p, (_POINTER, _INDEX)),
    "gguf_get_kv_type": (ctypes.c_int, (_POINTER, _INDEX)),
    "gguf_get_val_data": (_POINTER, (_POINTER, _INDEX)),
    "gguf_get_val_str": (ctypes.c_char_p, (_POINTER, _INDEX)),
    "gguf_get_arr_type": (ctypes.c_int, (_POINTER, _INDEX)),
    "gguf_get_arr_n": (ctypes.c_size_t, (_POINTER, _INDEX)),
    "gguf_get_arr_data": (_POINTER, (_POINTER, _INDEX)),
    "gguf_get_arr_str": (ctypes.c_char_p, (_POINTER, _INDEX, ctypes.c_size_t)),
}


@cache
def _gguf(name: str) -> Any:
    # All but reading the file take less time than to win the GIL back.
    is_short = name != "gguf_init_from_file"
    shared = lib._lib
    library = ctypes.PyDLL(shared._name, handle=shared._handle) if is_short else shared
    function = getattr(library, name)
    function.restype, function.argtypes = _FUNCTIONS[name]
    return function


class Header:
    """What a GGUF file says of itself: numbers, texts, and the names of its tensors.

    Made by `read`, and closed by it.
    """

    def __init__(self, handle: int) -> None:
        self._handle = handle
        n_keys = _gguf("gguf_get_n_kv")(handle)
        self._keys = {
            _gguf("gguf_get_key")(handle, i).decode(errors="replace"): i for i in range(n_keys)
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def has_tensor(self, names: Sequence[bytes]) -> bool:
        """Whether the file has one of these tensors."""
        return any(_gguf("gguf_find_tensor")(self._handle, name) >= 0 for name in names)

    def text(self, key: str) -> str:
        """Return a text; empty if there is none."""
        if (i := self._find(key, _STRING)) is None:
            return ""
        text: bytes = _gguf("gguf_get_val_str")(self._handle, i)
        return text.decode(errors="replace")

    def numbers(self, key: str) -> list[float]:
        """Return a number, or a list of numbers; empty if the key has neither."""
        if (i := self._keys.get(key)) is None:
            return []
        kind, n = _gguf("gguf_get_kv_type")(self._handle, i), 1
        data = "gguf_get_val_data"
        if kind == _ARRAY:
            kind = _gguf("gguf_get_arr_type")(self._handle, i)
            n, data = _gguf("gguf_get_arr_n")(self._handle, i), "gguf_get_arr_data"
        if kind not in _NUMBERS or not n:
            return []
        return list((_NUMBERS[kind] * n).from_address(_gguf(data)(self._handle, i)))

    def texts(self, key: str) -> list[bytes] | None:
        """Return a list of texts; None if there is none."""
        i = self._find(key, _ARRAY)
        if i is None or _gguf("gguf_get_arr_type")(self._handle, i) != _STRING:
            return None
        item, n = _gguf("gguf_get_arr_str"), _gguf("gguf_get_arr_n")(self._handle, i)
        return [item(self._handle, i, j) for j in range(n)]

    def _find(self, key: str, kind: int) -> int | None:
        i = self._keys.get(key)
        return i if i is not None and _gguf("gguf_get_kv_type")(self._handle, i) == kind else None


@contextmanager
def read(path: Path) -> Iterator[Header]:
    """Read the header of a file.

    Raises:
        ModelLoadError: llama.cpp cannot read it.
    """
    library.take_errors()
    handle = _gguf("gguf_init_from_file")(os.fsencode(path), _Params(True, None))
    if handle is None:
        why = library.reason(library.take_errors())
        raise ModelLoadError(f"The model file {path} cannot be read: {why}.")
    try:
        yield Header(handle)
    finally:
        _gguf("gguf_free")(handle)


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
        with read(path) as header:
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
