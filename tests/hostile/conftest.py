"""The report of the tests of attacks."""

from __future__ import annotations

from tests.support.measured import (
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
    report,
)

__all__ = ["pytest_sessionfinish", "pytest_terminal_summary", "pytest_testnodedown", "report"]
