"""What libmtmd takes for granted in the header of a projector's file."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from trioserve.errors import ModelLoadError
from trioserve.llama.model import check_file
from trioserve.models import gguf
from trioserve.models.gguf import Header
from trioserve.types.media import content_id

_KINDS = ("clip.projector_type", "clip.vision.projector_type", "clip.audio.projector_type")

#: Projectors that need more than is done here.
_UNKNOWN = {"deepseek4v": "its images must begin at certain places of a prompt"}

#: Bytes at the beginning and the end of a file that its fingerprint is made of.
_SAMPLE = 2**20

#: Windows of sound have so many frames, in which a stack must fit without a rest.
_WINDOW = 1500
_STACKED = ("ultravox", "voxtral", "glma", "meralion", "musicflamingo")


def check(path: Path) -> frozenset[str]:
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
        tensors = {one.name: one.shape for one in header.tensors()}
        problems = (*_problems(header, kinds), *_wrong_tensors(tensors, path.stat().st_size))
        for problem in problems:
            raise ModelLoadError(f"The projector {path} cannot be used: {problem}.")
    return kinds


def fingerprint(path: Path) -> str:
    """Make of a file what tells it from others: a hash of its size, its beginning and its end."""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        parts = [file.read(_SAMPLE)]
        file.seek(max(0, size - _SAMPLE))
        parts.append(file.read(_SAMPLE))
    return content_id(b"%d" % size, *parts)


def image_size(path: Path) -> int:
    """Read the width of the images that a projector was made for; 0: it does not say."""
    with gguf.read(path) as header:
        return int(header.number("clip.vision.image_size") or 0)


def _problems(header: Header, kinds: frozenset[str]) -> Iterator[str]:
    for kind in kinds & _UNKNOWN.keys():
        yield f"the type {kind} is not supported, because {_UNKNOWN[kind]}"
    key = "clip.audio.projector.stack_factor"
    for value in header.numbers(key) if kinds.intersection(_STACKED) else ():
        if value < 1 or _WINDOW % value:
            yield f"{key} is {value}, which does not divide {_WINDOW}"
    for key in header:
        values = header.numbers(key)
        if key.endswith("_epsilon") and not all(0 <= value <= 1 for value in values):
            yield f"{key} is {values[0]}, and should be small and positive"
        elif not all(map(math.isfinite, values)):
            yield f"{key} is not finite"
    for part in ("vision", "audio"):
        for name in ("embedding_length", "attention.head_count", "patch_size", "image_size"):
            key = f"clip.{part}.{name}"
            if any(not 1 <= value < 2**31 for value in header.numbers(key)):
                yield f"{key} is out of range"
        width, heads = (
            header.numbers(f"clip.{part}.{name}")
            for name in ("embedding_length", "attention.head_count")
        )
        if width and heads and width[0] % heads[0]:
            yield f"clip.{part}.embedding_length is {width[0]}, for {heads[0]} heads"


#: In encoders of sound, the keys may be without a bias.
_ATTENTION = re.compile(rb"([\w.]+\.attn_)[qkv](\.weight)|(v\.[\w.]+\.attn_)[qkv](\.bias)")


def _wrong_tensors(tensors: Mapping[bytes, tuple[int, ...]], file_size: int) -> Iterator[str]:
    for name, shape in tensors.items():
        if math.prod(shape) > 8 * file_size:  # no type has less than a bit for a weight
            yield f"the tensor {name.decode(errors='replace')} would be larger than the file"
    for match in filter(None, map(_ATTENTION.fullmatch, tensors)):
        before, after = filter(None, match.groups())
        for other in (before + letter + after for letter in (b"q", b"k", b"v")):
            if other not in tensors:
                yield f"it has the tensor {match[0].decode()}, but no {other.decode()}"
