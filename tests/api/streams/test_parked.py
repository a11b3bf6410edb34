"""Requests that wait for an `EventSource`."""

from __future__ import annotations

import json
import time
from typing import Any, cast

import pytest
import trio

from tests.support.clients import client_and_service, client_of
from tests.support.http_server import slots_in_use
from tests.support.scripts import CHAT
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.streams import parked
from trioserve.api.streams.parked import ConflictError, Lot, Parked
from trioserve.errors import NotFoundError, QueueFullError
from trioserve.testing import ScriptedBackend
from trioserve.types import GenerationParams

PREFER = {"Prefer": "wait=5, respond-async"}


def request() -> Parked:
    return Parked(ChatRequest.parse(CHAT), GenerationParams())


class FakeFeed:
    stopped = False

    def stop(self) -> None:
        self.stopped = True


def test_the_life_of_an_id() -> None:
    lot = Lot(lambda: 0.0)
    one = request()
    id_ = lot.park(one)
    assert len(id_) >= 32
    assert lot.take(id_) is one
    with pytest.raises(ConflictError):
        lot.take(id_)
    lot.end(id_)
    assert lot.take(id_) is None
    lot.cancel(id_)  # too late is fine
    with pytest.raises(NotFoundError):
        lot.take("unknown")
    with pytest.raises(NotFoundError):
        lot.cancel("unknown")


def test_cancel_where_it_stands() -> None:
    lot = Lot(lambda: 0.0)
    waiting, running = lot.park(request()), lot.park(request())
    lot.cancel(waiting)
    assert lot.take(waiting) is None
    lot.take(running)
    feed = FakeFeed()
    lot.runs(running, cast(Any, feed))
    lot.cancel(running)
    assert feed.stopped


def test_nobody_waits_for_ever() -> None:
    now = 0.0
    lot = Lot(lambda: now)
    early = lot.park(request())
    now = parked.EXPIRES / 2
    late = lot.park(request())
    now = parked.EXPIRES
    with pytest.raises(NotFoundError):
        lot.take(early)
    assert lot.take(late) is not None


def test_there_is_room_for_so_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parked, "MAX_PARKED", 2)
    monkeypatch.setattr(parked, "MAX_REMEMBERED", 1)
    lot = Lot(lambda: 0.0)
    first, second = lot.park(request()), lot.park(request())
    with pytest.raises(QueueFullError):
        lot.park(request())
    for id_ in (first, second):
        lot.take(id_)
        lot.end(id_)
    with pytest.raises(NotFoundError):
        lot.take(first)
    assert lot.take(second) is None


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
