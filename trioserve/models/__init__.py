"""The model that is shipped with trioserve: `BUNDLED` is the path of its GGUF file."""

from __future__ import annotations

from pathlib import Path

#: A small chat model, for a first run and for tests.
BUNDLED: Path = Path(__file__).with_name("bundled.gguf")
