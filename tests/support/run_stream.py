"""Reads streamed chats whose tools the server runs, over raw connections."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.support.http_server import chunks_of, post
from tests.support.scripts import HI

CHATS = "/v1/chat/completions"
RUN = {"messages": HI, "trioserve_run_tools": True}
STREAM = {**RUN, "stream": True}


class Reading:
    """Reads the chunks of an answer, as they come."""

    def __init__(self, next_chunk: Callable[[], Awaitable[str]]) -> None:
        self._next_chunk = next_chunk
        self._unread: list[Any] = []

    async def __call__(self) -> Any:
        while not self._unread:
            lines = (await self._next_chunk()).split("\n")
            data = [line.removeprefix("data: ") for line in lines if line.startswith("data: {")]
            self._unread = list(map(json.loads, data))
        return self._unread.pop(0)

    async def until(self, kind: str) -> tuple[str, Any]:
        """Read as far as an event; gives the id of the answer, and the event."""
        while True:
            chunk = await self()
            assert "error" not in chunk, chunk
            if (event := chunk.get("trioserve_event")) and event["type"] == kind:
                return chunk["id"], event


@asynccontextmanager
async def reading(url: str, *headers: str, **fields: Any) -> AsyncIterator[Reading]:
    """Stream an answer over a new connection, which closes with the block."""
    body = json.dumps({**STREAM, **fields}).encode()
    async with chunks_of(url, post(CHATS, body, *headers)) as next_chunk:
        yield Reading(next_chunk)
