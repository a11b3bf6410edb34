"""Models that call tools of the server, and reads of their streamed chats over raw connections."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from tests.support.http_server import chunks_of, post
from tests.support.scripts import HI, answering
from trioserve.testing import ScriptedBackend
from trioserve.tools.functions import tool_of

CHATS = "/v1/chat/completions"
RUN = {"messages": HI, "trioserve_run_tools": True}
STREAM = {**RUN, "stream": True}


async def weather(city: str) -> str:
    """Tell the weather."""
    if city == "Atlantis":
        raise LookupError("sunk")
    return f"sunny in {city}"


async def erase(path: str) -> str:
    """Delete a file."""
    return f"erased {path}"


WEATHER, ERASE = tool_of(weather), tool_of(erase, writes=True)


def call(name: str, **arguments: Any) -> str:
    """The text of a call of a tool."""
    written = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{written}\n</tool_call>"


def asking(*calls: str, then: str = "It is sunny.", before: str = "") -> ScriptedBackend:
    """A model that makes calls, and answers when it has the results."""
    made = before + "\n".join(calls)
    return answering(lambda prompt: then if "<tool_response>" in prompt else made)


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
