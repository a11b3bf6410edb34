"""Finds the file of a model by its reference, and has the bundled model."""

from __future__ import annotations

from pathlib import Path

#: A small chat model, for a first run and for tests.
BUNDLED: Path = Path(__file__).with_name("bundled.gguf")


def resolve(reference: str | None) -> Path:
    """Return the file that `Config.model` refers to: a path; none: the bundled model."""
    return BUNDLED if reference is None else Path(reference)
