"""Numbers that tests report, written when all have run. A conftest imports its functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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


# -- with several processes, by pytest-xdist


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Hand the lines of a worker to the process that writes."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["measured"] = _LINES[:]


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    _LINES.extend(getattr(node, "workeroutput", {}).get("measured", ()))
