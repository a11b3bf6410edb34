"""An engine that fails while it streams: one error event, then the end, in each API's own form."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from tests.support.broken_strategies import SECRET
from tests.support.clients import client_of
from trioserve.testing import ScriptedBackend

ID = {"X-Request-Id": "r1"}
FAILED = "The inference engine failed. The log has more, under r1."
HI = [{"role": "user", "content": "Hi"}]
BROKEN: dict[str, Any] = {
    "strategy": "tests.support.broken_strategies:Raises",
    "on_engine_failure": "stay",
}


def blocks_of(answer: httpx.Response) -> list[tuple[str, Any]]:
    """The events of a stream: their names and data."""
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/event-stream")
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        if block.startswith("retry: "):  # for an `EventSource`
            continue
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append((fields.get("event", ""), json.loads(fields["data"])))
    return events


def backend() -> ScriptedBackend:
    return ScriptedBackend(lambda prompt: "Hello there, how do you do?", n_slots=4)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": HI, "n": 2}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 99}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
async def test_a_stream_ends_with_one_error(path: str, body: dict[str, Any]) -> None:
    async with client_of(backend(), **BROKEN) as client:
        with capture_logs() as logs:
            answer = await client.post(path, json={**body, "stream": True}, headers=ID)
        again = await client.post(path, json=body, headers=ID)
    events = blocks_of(answer)
    assert len(events) > 1, "it has begun"
    assert all("error" not in data for _, data in events[:-1] if "response" not in data)
    name, last = events[-1]
    if path in ("/v1/responses", "/v1/messages"):
        assert (name, last["type"]) == ("error", "error")
    else:
        assert (name, list(last)) == ("", ["error"])
    if path == "/v1/responses":
        assert events[-2][0] == "response.failed"
        assert events[-2][1]["response"]["error"]["message"] == FAILED
    for error in (last["error"], again.json()["error"]):
        assert error["message"] == FAILED
    assert again.status_code == 500
    for text in (answer.text, again.text):
        assert SECRET not in text
        assert "RuntimeError" not in text
    told = [line for line in logs if "traceback" in line or line.get("exc_info")]
    assert [line["event"] for line in told] == ["the engine has failed"]


async def test_a_model_whose_engine_has_failed_is_loaded_after_it_was_unloaded() -> None:
    async with client_of(backend(), **BROKEN) as client:
        assert (await client.post("/completion", json={"prompt": "a"})).status_code == 500
        statuses = []
        for command in ("load", "unload", "load"):
            answer = await client.post(f"/models/{command}", json={"model": "scripted"})
            health = await client.get("/health")
            statuses.append((answer.status_code, health.status_code))
    assert statuses == [(503, 503), (200, 200), (200, 200)]


async def test_a_stream_for_an_event_source_ends_with_one_error() -> None:
    async with client_of(backend(), **BROKEN) as client:
        headers = {**ID, "Prefer": "respond-async"}
        body = {"messages": HI, "stream": True}
        put = await client.post("/v1/chat/completions", json=body, headers=headers)
        answer = await client.get(put.headers["Location"])
    *_, (name, error), last = blocks_of(answer)
    assert (name, error["error"]["message"]) == ("", FAILED)
    assert last == ("done", {})
