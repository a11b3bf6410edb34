"""For tests that run the command in this process, which sets up the log."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog


@pytest.fixture(autouse=True)
def forgetful_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set up the log for one test only: no logger keeps the level that a command has set."""
    configure = structlog.configure

    def configure_for_now(**settings: Any) -> None:
        configure(**settings | {"cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", configure_for_now)
    yield
    structlog.reset_defaults()
