"""Sessions in which more than one thing goes wrong, and results of calls."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from mcp_types import CallToolResult
from structlog.testing import capture_logs

from trioserve.errors import ToolServerError
from trioserve.tools.mcp import session
from trioserve.tools.mcp.entries import StdioEntry
from trioserve.tools.mcp.messages import without_surrogates
from trioserve.tools.mcp.session import result_of, with_session

ENTRY = StdioEntry(name="a", command="program")


async def fail_when_cancelled() -> None:
    try:
        await trio.sleep_forever()
    finally:
        raise KeyError("hidden")


@asynccontextmanager
async def failing(_entry: StdioEntry, end: Exception | None) -> AsyncIterator[Any]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(fail_when_cancelled)
        await trio.lowlevel.checkpoint()
        if end is not None:
            raise end
        await trio.sleep_forever()
    yield


async def use(_session: object) -> None:
    pytest.fail("there is no session")


def hidden(logs: list[Any]) -> list[str]:
    return [repr(one["exc_info"]) for one in logs]


async def test_errors_beside_the_one_that_is_raised_are_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    end = ToolServerError("it has ended")
    monkeypatch.setattr(session, "stdio_streams", partial(failing, end=end))
    with capture_logs() as logs, pytest.raises(ToolServerError):
        await with_session(ENTRY, use)
    assert hidden(logs) == ["KeyError('hidden')"]


async def test_errors_beside_a_cancellation_are_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "stdio_streams", partial(failing, end=None))
    with capture_logs() as logs, trio.move_on_after(0) as scope:
        await with_session(ENTRY, use)
    assert scope.cancelled_caught
    assert hidden(logs) == ["KeyError('hidden')"]


# -- results


def result(*content: dict[str, Any], **fields: Any) -> dict[str, Any]:
    answer = CallToolResult.model_validate({"content": content, **fields})
    return dict(result_of(answer).answer)


def test_texts_are_joined() -> None:
    texts = [{"type": "text", "text": text} for text in ("one", "", "two")]
    assert result(*texts) == {"plain_text_response": "one\n\ntwo"}
    assert result() == {"plain_text_response": ""}


def test_structured_content_stands_in_for_text() -> None:
    assert result(structuredContent={"é": 1}) == {"plain_text_response": '{"é": 1}'}
    text = {"type": "text", "text": "{}"}
    assert result(text, structuredContent={"a": 1}) == {"plain_text_response": "{}"}


def test_errors() -> None:
    assert result({"type": "text", "text": "no"}, isError=True) == {"error": "no"}
    silent = {"error": "The tool has failed, and does not say why."}
    assert result(isError=True) == silent


def test_what_is_no_text_is_named() -> None:
    image = {"type": "image", "mimeType": "image/png", "data": "AAAA" * 1000}
    audio = {"type": "audio", "mimeType": "audio/wav", "data": "AAAA"}
    link = {"type": "resource_link", "name": "notes", "uri": "file:///notes.txt"}
    text = {"type": "resource", "resource": {"uri": "file:///a.txt", "text": "inside"}}
    blob = {"type": "resource", "resource": {"uri": "file:///b.bin", "blob": "AAAA"}}
    assert result(image, audio, link, text, blob)["plain_text_response"].splitlines() == [
        "[image, image/png, 3,000 bytes, not shown]",
        "[audio, audio/wav, 3 bytes, not shown]",
        "[resource notes: file:///notes.txt]",
        "inside",
        "[resource file:///b.bin, 3 bytes, not shown]",
    ]


def test_halves_of_surrogate_pairs() -> None:
    value = {"a\ud800": ["\udc00", "\ud83d\ude00", 1, None, "ö"]}
    assert without_surrogates(value) == {"a\ufffd": ["\ufffd", "😀", 1, None, "ö"]}
