"""The identity of a sequence's state: the model's content, and settings of the context."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from trioserve.config import Config
from trioserve.llama import devices
from trioserve.llama.context import ROPE_FIELDS
from trioserve.models import gguf

#: Bytes of each tensor that are looked at, in its middle. All of a large file would take minutes.
_SAMPLE = 4096

#: Settings that change the keys and values, or how they are stored.
_SETTINGS = (
    "cache_type_k",
    "cache_type_v",
    "flash_attn",
    "swa_full",
    "override_kv",
    "control_vector_layer_range",
    "rope_scaling",
    *ROPE_FIELDS,
)


def of_states(config: Config, model: Path, shape: object) -> str:
    """Identify the states of a context: 32 hexadecimal digits.

    Args:
        config: its settings.
        model: the file, or the first of several.
        shape: what else they depend on.

    Raises:
        OSError: a file cannot be read.
    """
    settings = [getattr(config, name) for name in _SETTINGS]
    vectors = [(of_file(Path(path)), scale) for path, scale in config.control_vector_files]
    digest = hashlib.blake2b(digest_size=16)
    digest.update(repr((devices.versions(), settings, vectors, shape)).encode())
    for part in gguf.parts_of(model):
        digest.update(of_file(part).encode())
    return digest.hexdigest()


def of_file(path: Path) -> str:
    """Identify a GGUF file: by its header, its size, and a piece of each tensor.

    Raises OSError if it cannot be read.
    """
    digest = hashlib.blake2b(digest_size=16)
    with gguf.read(path) as header:
        places = sorted(tensor.offset for tensor in header.tensors())
        start = header.data_start()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(b"%d" % size)
        for at, length in _pieces(places, start, size):
            file.seek(at)
            digest.update(file.read(length))
    return digest.hexdigest()


def _pieces(offsets: list[int], start: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the header, and the middle of each tensor: places and lengths."""
    yield 0, start
    for offset, end in zip(offsets, [*offsets[1:], size - start], strict=True):
        yield start + max(offset, (offset + end - _SAMPLE) // 2), _SAMPLE
