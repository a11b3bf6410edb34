"""What comes out of a session in which more than one thing goes wrong."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
from structlog.testing import capture_logs

from trioserve.errors import ToolServerError
from trioserve.tools.mcp import session
from trioserve.tools.mcp.entries import StdioEntry
from trioserve.tools.mcp.session import with_session

ENTRY = StdioEntry(name="a", command="program")


async def fail_when_cancelled() -> None:
    try:
        await trio.sleep_forever()
    finally:
        raise KeyError("hidden")


@asynccontextmanager
async def failing(_entry: StdioEntry) -> AsyncIterator[Any]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail_when_cancelled)
        await trio.lowlevel.checkpoint()
        raise ToolServerError("it has ended")
    yield


@asynccontextmanager
async def waiting(_entry: StdioEntry) -> AsyncIterator[Any]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail_when_cancelled)
        await trio.sleep_forever()
    yield


async def use(_session: object) -> None:
    pytest.fail("there is no session")


def hidden(logs: list[Any]) -> list[str]:
    return [repr(one["exc_info"]) for one in logs]


async def test_errors_beside_the_one_that_is_raised_are_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(session, "stdio_streams", failing)
    with capture_logs() as logs, pytest.raises(ToolServerError):
        await with_session(ENTRY, use)
    assert hidden(logs) == ["KeyError('hidden')"]


async def test_errors_beside_a_cancellation_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "stdio_streams", waiting)
    with capture_logs() as logs, trio.move_on_after(0) as scope:
        await with_session(ENTRY, use)
    assert scope.cancelled_caught
    assert hidden(logs) == ["KeyError('hidden')"]
