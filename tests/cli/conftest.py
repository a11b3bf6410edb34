"""Tests of the command, some of which run it in this process, and some with a hub."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import structlog

from tests.hub.fixtures import cache, hub

__all__ = ["cache", "hub"]


@pytest.fixture(autouse=True)
def _forgetful_logs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set up the log for one test only: no logger keeps the level that a command has set."""
    configure = structlog.configure

    def configure_for_now(**settings: Any) -> None:
        configure(**settings | {"cache_logger_on_first_use": False})

    monkeypatch.setattr(structlog, "configure", configure_for_now)
    yield
    structlog.reset_defaults()
