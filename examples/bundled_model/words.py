"""The words that the corpus is made of, in ``words.toml``."""

from __future__ import annotations

import tomllib
from functools import cache
from pathlib import Path
from typing import Any


@cache
def _tables() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def table(module: str) -> Any:
    """Return the lists of a module."""
    return _tables()[module]


def pairs(entries: list[str]) -> list[list[str]]:
    """Split entries such as ``France:Paris``."""
    return [entry.split(":") for entry in entries]
