"""Which file a reference stands for."""

from __future__ import annotations

from pathlib import Path

from trioserve.models import BUNDLED, resolve


def test_no_reference_is_the_bundled_model() -> None:
    assert resolve(None) == BUNDLED
    assert BUNDLED.is_file()


def test_a_reference_is_a_path() -> None:
    assert resolve("models/qwen.gguf") == Path("models/qwen.gguf")
