"""Cancellation at every await of an HTTP request, from ASGI's first message to its last."""

from __future__ import annotations

import json
import os
from functools import partial
from typing import Any

import pytest
import trio

from tests.support.cancellation import CancelAtStep
from trioserve import api
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.testing import ScriptedBackend, scripted

COMPACTED = {
    "input": "some text",
    "max_output_tokens": 2,
    "context_management": [{"type": "compaction", "compact_threshold": 9}],
}
CHAT = {"messages": [{"role": "user", "content": "some text"}], "max_tokens": 3}


async def _request(
    app: api.App, path: str, body: dict[str, Any], sent: list[dict[str, Any]]
) -> None:
    """Make a request as a server would that has no sockets; adds the answer to `sent`."""
    messages = [{"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}]

    async def receive() -> dict[str, Any]:
        await trio.lowlevel.checkpoint()
        if messages:
            return messages.pop()
        await trio.sleep_forever()
        raise AssertionError("unreachable")

    async def send(message: dict[str, Any]) -> None:
        await trio.lowlevel.checkpoint()
        sent.append(message)

    scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.1"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"localhost"), (b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "state": {},
        "extensions": {},
    }
    await app(scope, receive, send)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": ["one", "two"], "max_tokens": 2, "stream": True}),
        ("/v1/responses", {"input": "some text", "max_output_tokens": 2, "stream": True}),
        ("/completion", {"prompt": "some text", "n_predict": 2, "stream": True}),
        ("/v1/messages", CHAT | {"stream": True}),
        ("/v1/messages", CHAT),
        ("/api/chat", CHAT),
        ("/v1/responses", COMPACTED | {"stream": True}),
        ("/v1/messages", CHAT | {"compaction": {"type": "summarize"}}),
    ],
    ids=[
        "chat stream",
        "chat",
        "two prompts",
        "response",
        "completion",
        "message stream",
        "message",
        "lines",
        "compacted response",
        "compaction",
    ],
)
async def test_cancellation_at_every_await_leaves_nothing(path: str, body: dict[str, Any]) -> None:
    backend = ScriptedBackend(n_ctx=4096)
    app = create_app(Config(stream_interval_ms=0), load=scripted(backend))
    service = app.extensions["trioserve"]
    api.configure(app, service.config)
    async with trio.open_nursery() as nursery:
        await nursery.start(service.run)
        app.nursery = nursery
        await _request(app, path, body, [])  # what is made once is made now
        before = len(os.listdir("/proc/self/fd")), trio.lowlevel.current_statistics().tasks_living
        for n in range(1, 10_000):
            instrument = CancelAtStep(n)
            sent: list[dict[str, Any]] = []

            await instrument.run(partial(_request, app, path, body, sent))
            status = await service.server.status()
            assert all(slot.task_id is None for slot in status.slots)
            assert status.waiting == ()
            assert len(service.server.lifecycle.services.dispatcher) == 0
            assert backend.n_samplers == 0
            now = len(os.listdir("/proc/self/fd")), trio.lowlevel.current_statistics().tasks_living
            assert now == before
            if not instrument.scope.cancel_called:
                break
        assert n > 10
        assert sent[0]["status"] == 200
        assert sent[-1]["more_body"] is False
        await service.stop()
