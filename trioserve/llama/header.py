"""What llama.cpp and libmtmd take for granted in the header of a GGUF file.

They end the process where such a value is wrong, so these checks look at them first. What they
do not know of, such as the values of single architectures, they let pass.
"""

from __future__ import annotations

import math
import os
import struct
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from difflib import get_close_matches
from functools import lru_cache
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trioserve.errors import ModelLoadError
from trioserve.llama import shape as shapes
from trioserve.llama.shape import MAX_LAYERS, Shape
from trioserve.models import gguf, tensors
from trioserve.models.gguf import Header
from trioserve.types.media import content_id

_MAGIC = b"GGUF"
_HEADER = struct.Struct("<4sIQQ")  # magic, version, number of tensors, number of metadata entries
_MAX_EXPERTS = 1024  # llama.cpp's
_MAX_SIZE = 2**31 - 1
_MAX_SIMILAR = 3
_MAX_EPSILON = 1.0
_ROPE_SCALINGS = ("none", "linear", "yarn", "longrope")
_TOKENS = "tokenizer.ggml.tokens"
_NONE: Mapping[str, str] = MappingProxyType({})


def check_file(path: Path) -> None:
    """Check that a file exists, can be read, and begins as a GGUF does.

    Raises:
        ModelLoadError: it does not; the message is one sentence that names the problem.
    """
    try:
        if path.is_dir():
            raise ModelLoadError(f"The model file {path} is a directory.")
        with path.open("rb") as file:
            head = file.read(_HEADER.size)
    except FileNotFoundError as error:
        raise ModelLoadError(f"No such file: {path}{_similar_files(path)}.") from error
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ModelLoadError(f"The model file {path} cannot be read: {why}.") from error
    if not head:
        raise ModelLoadError(f"The model file {path} is empty.")
    if head[:4] != _MAGIC[: len(head)]:
        raise ModelLoadError(
            f"The model file {path} is not a GGUF file: it does not begin with GGUF."
        )
    if len(head) < _HEADER.size:
        raise ModelLoadError(f"The model file {path} is cut short: it has {len(head)} bytes.")
    version = _HEADER.unpack(head)[1]
    if version >= 2**16:
        raise ModelLoadError(f"The model file {path} was written for big-endian machines.")
    if version < 2:
        raise ModelLoadError(
            f"The model file {path} has version {version} of GGUF, which is too old; convert it."
        )


def _similar_files(path: Path) -> str:
    """Name the GGUF files whose names are like that of a missing one, and else those beside it."""
    try:
        there = sorted(one.name for one in path.parent.iterdir() if one.suffix == ".gguf")
    except OSError:
        return f"; there is no folder {path.parent}"
    names = get_close_matches(path.name, there, _MAX_SIMILAR, cutoff=0.75) or there[:_MAX_SIMILAR]
    return f"; there is {', '.join(str(path.parent / name) for name in names)}" if names else ""


def check_model(path: Path, overridden: Mapping[str, str] = _NONE) -> Shape | None:
    """Refuse values that would end the process when the model is loaded or used.

    A file whose header cannot be read is not refused: llama.cpp says what is wrong with it.

    Args:
        path: of the file.
        overridden: values that are used in place of those in the file, by their keys.

    Returns:
        the sizes of the model's parts; None if the header cannot be read.

    Raises:
        ModelLoadError: there is such a value; the message names it.
    """
    stats = tuple((part, *_version(part)) for part in gguf.parts_of(path))
    problem, shape = _examine(stats, tuple(overridden.items()))
    if problem:
        raise ModelLoadError(f"The model file {path} cannot be used: {problem}.")
    return shape


def _version(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino


@lru_cache(maxsize=4)  # a model is measured before it is loaded
def _examine(
    files: tuple[tuple[Any, ...], ...], overridden: tuple[tuple[str, str], ...]
) -> tuple[str, Shape | None]:
    """Find the first problem of the files of a model, and its shape."""
    paths = [one[0] for one in files]
    size, replaced = gguf.total_size(paths), dict(overridden)
    try:
        with ExitStack() as opened:
            headers = [opened.enter_context(gguf.read(path)) for path in paths]
            found = (_problem(header, size, replaced) for header in headers)
            if problem := next(filter(None, found), ""):
                return problem, None
            sizes = [path.stat().st_size for path in paths]
            return "", shapes.measure(list(zip(headers, sizes, strict=True)), replaced)
    except (ModelLoadError, OSError):
        return "", None


def _problem(header: Header, size: int, replaced: Mapping[str, str]) -> str:
    """Find the first problem of a file; empty if there is none."""
    of_keys = _problems(header, header.text("general.architecture"))
    problems = [f"{key} {why}" for key, why in of_keys if key not in replaced]
    problems += tensors.model_problems(tensors.by_name(header.tensors()), size)
    return next(iter(problems), "")


def _problems(header: Header, arch: str) -> Iterator[tuple[str, str]]:
    yield from _odd_numbers(header, f"{arch}.")
    yield from _sizes(header, arch)
    yield from _heads(header, arch)
    yield from _experts(header, arch)
    yield from _vocabulary(header)


def _odd_numbers(header: Header, prefix: str = "") -> Iterator[tuple[str, str]]:
    for key in header:
        values = header.numbers(key) if key.startswith(prefix) else []
        if not all(map(math.isfinite, values)):
            yield key, "is not finite"
        elif key.endswith("_epsilon") and not all(0 <= one <= _MAX_EPSILON for one in values):
            yield key, f"is {values[0]}, and should be small and positive"


def _sizes(header: Header, arch: str) -> Iterator[tuple[str, str]]:
    for name, most in (
        ("block_count", MAX_LAYERS),
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
    if not sized and width and counts and min(counts) > 0:
        sized = [width[0] // min(counts)]
    for name in ("rope.dimension_count", "rope.dimension_count_swa"):
        for value in header.numbers(f"{arch}.{name}"):
            if value % 2 or (sized and value > max(sized)):
                yield f"{arch}.{name}", f"is {value}, and should be even and within a head"


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


def check_adapter(path: Path) -> None:
    """Refuse a LoRA adapter with tensors that would end the process.

    Raises:
        ModelLoadError: it cannot be used; the message says why.
    """
    check_file(path)
    with gguf.read(path) as header:
        found = tensors.by_name(header.tensors())
        for problem in tensors.adapter_problems(found, path.stat().st_size):
            raise ModelLoadError(f"The LoRA adapter {path} cannot be used: {problem}.")


_KINDS = ("clip.projector_type", "clip.vision.projector_type", "clip.audio.projector_type")

#: Projectors that need more than is done here.
_UNKNOWN = {"deepseek4v": "its images must begin at certain places of a prompt"}

#: Bytes at the beginning and the end of a file that its fingerprint is made of.
_SAMPLE = 2**20

#: Frames in a window of sound. The size of a stack must divide it.
_WINDOW = 1500
_STACKED = ("ultravox", "voxtral", "glma", "meralion", "musicflamingo")


def check_projector(path: Path) -> frozenset[str]:
    """Refuse a file that is no projector, or whose values would end the process.

    Returns:
        the types of the projectors in it.

    Raises:
        ModelLoadError: it cannot be used; the message says why.
    """
    check_file(path)
    with gguf.read(path) as header:
        arch = header.text("general.architecture")
        if arch != "clip":
            raise ModelLoadError(
                f"The file {path} is no projector: its architecture is {arch or 'not given'}."
            )
        kinds = frozenset(header.text(key) for key in _KINDS if key in header)
        found = tensors.by_name(header.tensors())
        widths = {
            part[0]: header.whole(key)
            for part in ("vision", "audio")
            if (key := f"clip.{part}.embedding_length") in header
        }
        size = path.stat().st_size
        for problem in chain(
            _projector_problems(header, kinds),
            tensors.projector_problems(found, kinds, widths, size),
        ):
            raise ModelLoadError(f"The projector {path} cannot be used: {problem}.")
    return kinds


def fingerprint(path: Path) -> str:
    """Compute a file's fingerprint: a hash of its size, its beginning and its end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        parts = [file.read(_SAMPLE)]
        file.seek(max(0, size - _SAMPLE))
        parts.append(file.read(_SAMPLE))
    return content_id(b"%d" % size, *parts)


def image_size(path: Path) -> int:
    """Read the width of the images that a projector was made for; 0: not given."""
    with gguf.read(path) as header:
        return header.whole("clip.vision.image_size")


def _projector_problems(header: Header, kinds: frozenset[str]) -> Iterator[str]:
    for kind in kinds & _UNKNOWN.keys():
        yield f"the type {kind} is not supported, because {_UNKNOWN[kind]}"
    key = "clip.audio.projector.stack_factor"
    for value in header.numbers(key) if kinds.intersection(_STACKED) else ():
        if value < 1 or _WINDOW % value:
            yield f"{key} is {value}, which does not divide {_WINDOW}"
    yield from (f"{key} {why}" for key, why in _odd_numbers(header))
    for part in ("vision", "audio"):
        for name in ("embedding_length", "attention.head_count", "patch_size", "image_size"):
            key = f"clip.{part}.{name}"
            if any(not 1 <= value < 2**31 for value in header.numbers(key)):
                yield f"{key} is out of range"
        image, patch = (
            header.number(f"clip.{part}.{name}") for name in ("image_size", "patch_size")
        )
        if image is not None and patch is not None and image < patch:
            yield f"clip.{part}.image_size is {image}, less than a patch"
        width, heads = (
            header.numbers(f"clip.{part}.{name}")
            for name in ("embedding_length", "attention.head_count")
        )
        if width and heads and heads[0] > 0 and width[0] % heads[0]:
            yield f"clip.{part}.embedding_length is {width[0]}, for {heads[0]} heads"
