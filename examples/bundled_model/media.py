"""The files of the finished model, and how media stand in a conversation."""

from __future__ import annotations

from pathlib import Path

BUNDLED = Path("trioserve/models/bundled.gguf")
PROJECTOR = BUNDLED.with_name("bundled-mmproj.gguf")
#: Stands for the media in a message; no other text contains it.
MARK = "\ue000"
