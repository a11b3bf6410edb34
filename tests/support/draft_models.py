"""Draft models for the bundled model: the same with parts of it silenced."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

from gguf import GGUFReader

from trioserve.models import BUNDLED


def write_weak_draft(path: Path, silent: Sequence[int] = (0,)) -> Path:
    """Copy the bundled model, less what some of its layers add; returns the path."""
    shutil.copy(BUNDLED, path)
    reader = GGUFReader(path, "r+")
    names = {f"blk.{i}.{part}.weight" for i in silent for part in ("attn_output", "ffn_down")}
    found = [tensor for tensor in reader.tensors if tensor.name in names]
    assert len(found) == len(names)
    for tensor in found:
        tensor.data[:] = 0
    return path
