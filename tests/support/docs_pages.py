"""The pages of the documentation, and the module that generates parts of them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def _load_hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


hooks = _load_hooks()


def built(page: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return str(hooks.on_page_markdown(text))
