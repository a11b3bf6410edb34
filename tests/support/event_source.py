"""Reads streams that can be resumed, as a page does: cut off anywhere, and on again."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import attrs
import httpx
import pytest
import trio

from tests.support.scripts import answering
from trioserve.api import streams
from trioserve.api.base.caller import Caller
from trioserve.api.edge.connection import Connection
from trioserve.testing import ScriptedBackend


class Gate:
    """Blocks a backend, except for the allowed number of decodes."""

    def __init__(self) -> None:
        self._allowed = threading.Semaphore(0)
        self.n_asked = 0  # decodes that were begun

    def __call__(self, backend: ScriptedBackend) -> None:
        """Wait; for a backend's `on_decode`. Times out, so that a failing test does not hang."""
        self.n_asked += 1
        assert self._allowed.acquire(timeout=60)

    def allow(self, n: int) -> None:
        """Allow `n` more decodes."""
        self._allowed.release(n)

    def open(self) -> None:
        """Allow all further decodes."""
        self.allow(10_000)


def gated(text: str, **settings: Any) -> tuple[ScriptedBackend, Gate]:
    """A backend that answers with a text, a decode at a time."""
    backend, gate = answering(text, **settings), Gate()
    backend.on_decode = gate
    return backend, gate


def connections_of_readers(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """Note the readers of streams in the order in which they come: each can be cut off."""
    connections: list[Callable[[], None]] = []
    scopes: dict[str, trio.CancelScope] = {}
    call, follow = Connection.__call__, streams.follow

    async def cuttable(self: Connection, receive: Any, send: Any) -> None:
        with trio.CancelScope() as scope:
            scopes[self.scope["path"]] = scope
            await call(self, receive, send)

    def noted(caller: Caller, *args: Any, **kwargs: Any) -> Any:
        connections.append(scopes[caller.path].cancel)
        return follow(caller, *args, **kwargs)

    monkeypatch.setattr(Connection, "__call__", cuttable)
    monkeypatch.setattr(streams, "follow", noted)
    return connections


def ids_in(data: bytes) -> list[int]:
    """The ids of the events."""
    return [int(line[4:]) for line in data.split(b"\n") if line.startswith(b"id: ")]


def payloads_in(data: bytes) -> list[Any]:
    """The JSON of the events, without OpenAI's last one."""
    lines = [line[6:] for line in data.split(b"\n") if line.startswith(b"data: ")]
    return [json.loads(line) for line in lines if line != b"[DONE]"]


def text_in(data: bytes) -> str:
    """The text in the events of a chat."""
    deltas = [event["choices"][0]["delta"] for event in payloads_in(data) if event.get("choices")]
    return "".join(delta.get("content") or "" for delta in deltas)


def text_of(chunks: str) -> str:
    """The same, of chunks as `chunks_of` gives them."""
    return text_in(chunks.encode())


@attrs.define
class EventSource:
    """A browser's EventSource, as streams notice it: it comes back with an id."""

    client: httpx.AsyncClient
    url: str
    last_id: str = ""
    names: list[str] = attrs.field(factory=list)
    data: list[str] = attrs.field(factory=list)
    n_connections: int = 0

    async def run(self) -> int:
        """Read until the server says that there is no more; returns the status that said so."""
        while True:
            self.n_connections += 1
            headers = {"Accept": "text/event-stream"}
            if self.last_id:
                headers["Last-Event-ID"] = self.last_id
            async with self.client.stream("GET", self.url, headers=headers) as response:
                if response.status_code != 200:
                    return response.status_code
                with suppress(httpx.TransportError):  # and again
                    await self._read(response)

    async def _read(self, response: httpx.Response) -> None:
        event: dict[str, str] = {}
        async for line in response.aiter_lines():
            name, _, value = line.partition(": ")
            if line:
                event[name] = value
            elif event:
                self.last_id = event.get("id", self.last_id)
                if "data" in event:
                    self.names.append(event.get("event", "message"))
                    self.data.append(event["data"])
                event = {}
