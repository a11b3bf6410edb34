"""Streams that can be resumed, in a router: they live there, whatever becomes of the model."""

from __future__ import annotations

import json

import trio

from tests.support.event_source import gated, payloads_in, text_in, text_of
from tests.support.fake_fleet import routed
from tests.support.http_server import chunks_of, post
from tests.support.scripts import CHAT, answering
from tests.support.waiting import patiently, until

CHATS = "/v1/chat/completions"
NAMED = {"X-Conversation-Id": "chat::two"}
READ = "/v1/stream?conv_id=chat::two"
STREAM = {**CHAT, "model": "two", "stream": True}
ASK = post(CHATS, json.dumps(STREAM).encode(), "X-Conversation-Id: chat::two")


async def test_a_stream_is_resumed() -> None:
    backend, gate = gated("0123456789" * 20)
    async with routed({"one": None, "two": backend}) as router:
        gate.allow(20)
        async with chunks_of(router.url, ASK) as next_chunk:
            read = await next_chunk()
            while not text_of(read):
                read += await next_chunk()
        data = read.encode()
        gate.open()
        found = await router.client.post("/v1/streams/lookup", json={"conversation_ids": ["chat"]})
        assert [each["conversation_id"] for each in found.json()] == ["chat::two"]
        rest = await router.client.get(f"{READ}&from={len(data)}")
        assert text_in(data + rest.content) == "0123456789" * 20
        await router.service.n_lent.wait_value(0)
        assert router.fleet.users == []
        # It is the router's: the model is not asked.
        router.fleet.children.clear()
        assert (await router.client.get(READ)).content == data + rest.content
        assert (await router.client.delete(READ)).status_code == 204
        assert (await router.client.get(READ)).status_code == 404


async def test_an_event_source() -> None:
    async with routed({"one": None, "two": answering("second")}) as router:
        accepted = await router.client.post(
            CHATS, json={**CHAT, "model": "two"}, headers={"Prefer": "respond-async"}
        )
        assert accepted.status_code == 202
        stream = await router.client.get(accepted.headers["location"])
        assert text_in(stream.content.replace(b"event: done\ndata: {}\n\n", b"")) == "second"
        assert (await router.client.get("/v1/stream/other")).status_code == 404


async def test_stopping_a_stream_frees_the_model() -> None:
    backend, gate = gated("x" * 1000, n_slots=1)
    async with routed({"two": backend}) as router:
        gate.allow(10)
        async with chunks_of(router.url, ASK) as next_chunk:
            await next_chunk()
            assert router.fleet.users == ["two"]
            assert (await router.client.delete(READ)).status_code == 204
        with patiently():
            await router.service.n_lent.wait_value(0)
        gate.open()
        assert router.fleet.users == []


async def test_a_process_that_is_killed() -> None:
    backend, gate = gated("0123456789" * 20)
    async with routed({"two": backend}) as router:
        gate.allow(20)
        async with chunks_of(router.url, ASK) as next_chunk:
            read = await next_chunk()
            while not text_of(read):
                read += await next_chunk()
            router.processes["two"].die()
            while "error" not in read:
                read += await next_chunk()
        gate.open()
        first, *_, last = payloads_in(read.encode())
        assert first["choices"] and last["error"]["code"] == "model_process_ended"
        assert read.count("model_process_ended") == 1
        assert (await router.client.get(READ)).content == read.encode()


async def test_a_process_that_is_killed_before_it_answers() -> None:
    backend, gate = gated("a")
    backends = {"one": answering("b"), "two": backend}
    async with routed(backends) as router, trio.open_nursery() as nursery:

        async def die() -> None:
            await until(lambda: gate.n_asked)
            router.processes["two"].die()
            gate.open()

        nursery.start_soon(die)
        body = {**STREAM, "model": "two", "stream": False}
        answer = await router.client.post(CHATS, json=body, headers=NAMED)
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "model_process_ended"
        assert (await router.client.get(READ)).status_code == 404
        unknown = await router.client.post(CHATS, json={**STREAM, "model": "x"}, headers=NAMED)
        assert unknown.status_code == 404
        assert "'x'" in unknown.json()["error"]["message"]


async def test_metrics_and_keys() -> None:
    async with routed({"two": answering("a")}, api_keys=("k",), metrics_endpoint=True) as router:
        key = {"Authorization": "Bearer k"}
        await router.client.post(CHATS, json=STREAM, headers={**NAMED, **key})
        assert (await router.client.get(READ)).status_code == 401
        assert (await router.client.get(READ, headers=key)).status_code == 200
        text = (await router.client.get("/metrics", headers=key)).text
        assert 'trioserve:streams{state="finished"} 1.0' in text
