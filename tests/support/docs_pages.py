"""The pages of the documentation, and the module that generates parts of them."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).parents[2]


def _load_tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.append(str(ROOT / "docs"))  # it imports others there
    spec.loader.exec_module(module)
    return module


tables = _load_tables()


def read_page(name: str) -> str:
    return (ROOT / "docs" / name).read_text(encoding="utf-8")
