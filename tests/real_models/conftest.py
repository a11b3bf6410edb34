"""The model, and the numbers that are reported at the end."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.real_models.install import NAME

Report = Callable[[str], None]

_LINES: list[str] = []


@pytest.fixture(scope="session")
def gemma() -> Path:
    folder = os.environ.get("TEST_MODELS")
    if not folder:
        pytest.skip("needs a real model: run `make test-models`")
    return Path(folder, NAME)


@pytest.fixture(scope="session")
def report() -> Report:
    """Takes lines that are written when all tests have run."""
    return _LINES.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _LINES:
        terminalreporter.section("measured")
        for line in _LINES:
            terminalreporter.write_line(line)
