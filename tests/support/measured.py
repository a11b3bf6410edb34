"""Numbers that tests report, written when all have run. A conftest imports both functions."""

from __future__ import annotations

from collections.abc import Callable

import pytest

Report = Callable[[str], None]

_LINES: list[str] = []


@pytest.fixture(scope="session")
def report() -> Report:
    """Takes lines that are written when all tests have run."""
    return _LINES.append


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _LINES:
        terminalreporter.section("measured")
    while _LINES:
        terminalreporter.write_line(_LINES.pop(0))
