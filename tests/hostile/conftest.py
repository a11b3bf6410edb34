"""What the tests of attacks report."""

from __future__ import annotations

from tests.support.measured import pytest_terminal_summary, report

__all__ = ["pytest_terminal_summary", "report"]
