"""Requests that wait for an `EventSource`."""

from __future__ import annotations

import json
import time

import trio

from tests.support.clients import client_and_service, client_of
from tests.support.http_server import slots_in_use
from tests.support.scripts import CHAT
from trioserve.testing import ScriptedBackend

PREFER = {"Prefer": "wait=5, respond-async"}


async def test_an_event_source_reads_its_answer_once() -> None:
    backend = ScriptedBackend(lambda prompt: "Hello")
    async with (
        client_of(backend, api_keys=("key",)) as client,
    ):
        refused = await client.post("/v1/chat/completions", json=CHAT, headers=PREFER)
        assert refused.status_code == 401
        headers = PREFER | {"Authorization": "Bearer key"}
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.status_code == 202
        assert backend.n_decodes == 0
        location = answer.headers["Location"]
        assert answer.json() == {"location": location}
        assert (await client.head(location)).status_code == 405
        stream = await client.get(location)
        assert stream.headers["Content-Type"] == "text/event-stream"
        *events, done, last, rest = stream.text.split("\n\n")
        assert done == "data: [DONE]"
        assert last == "event: done\ndata: {}"
        assert rest == ""
        chunks = [json.loads(event.removeprefix("data: ")) for event in events]
        text = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
        assert text == "Hello"
        assert (await client.get(location)).status_code == 204
        assert (await client.get("/v1/stream/guess")).status_code == 404


async def test_a_request_is_checked_before_it_is_parked() -> None:
    async with client_of() as client:
        bad = await client.post("/v1/chat/completions", json={}, headers=PREFER)
        assert bad.status_code == 400


async def test_delete_stops_a_stream_that_runs() -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 10_000, n_ctx=20_000)
    backend.on_decode = lambda backend: time.sleep(0.001)
    async with (
        client_and_service(backend) as (client, service),
    ):
        answer = await client.post("/v1/chat/completions", json=CHAT, headers=PREFER)
        location = answer.headers["Location"]
        async with client.stream("GET", location) as stream:
            lines = stream.aiter_lines()
            await anext(lines)
            assert (await client.get(location)).status_code == 409
            assert (await client.delete(location)).status_code == 204
            rest = [line async for line in lines if line]
        assert "was cancelled" in rest[-3]
        assert rest[-2:] == ["event: done", "data: {}"]
        with trio.fail_after(10):
            while await slots_in_use(service):
                await trio.lowlevel.checkpoint()
        assert (await client.get(location)).status_code == 204
        assert (await client.delete(location)).status_code == 204
        assert (await client.delete("/v1/stream/guess")).status_code == 404
