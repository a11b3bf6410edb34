"""The model, and the numbers that are reported at the end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.real_models.install import NAME
from tests.support.measured import pytest_terminal_summary, report

__all__ = ["pytest_terminal_summary", "report"]


@pytest.fixture(scope="session")
def gemma() -> Path:
    folder = os.environ.get("TEST_MODELS")
    if not folder:
        pytest.skip("needs a real model: run `make test-models`")
    return Path(folder, NAME)
