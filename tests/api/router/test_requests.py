"""Requests to a router: they reach the right model, and learn when its process has ended."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import trio

from tests.support.clients import error_body, events_in, named_events_in
from tests.support.fake_fleet import routed
from tests.support.http_server import chunks_of, connected, post
from tests.support.media_files import wav_file
from tests.support.projectors import WordProjector
from tests.support.scripts import CHAT, answering
from tests.support.unix_server import SSE_HEAD, chunk, playing, send
from tests.support.waiting import patiently
from trioserve.api.router.forwarding import PassedResponse
from trioserve.testing import ScriptedBackend

TWO = {"one": None, "two": None}


def two() -> dict[str, ScriptedBackend]:
    return {"one": answering("first"), "two": answering("second", n_slots=3)}


def text_of(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


async def test_the_body_names_the_model() -> None:
    async with routed(two()) as router:
        for model, text in (("one", "first"), ("two", "second"), ("TW", "second")):
            body = {**CHAT, "model": model}
            assert text_of(await router.client.post("/v1/chat/completions", json=body)) == text
        answer = await router.client.post("/props", json={"model": "two"})
        assert answer.status_code == 501  # as a model without --props answers
        await router.service.n_forwarded.wait_value(0)
        assert router.fleet.users == []


async def test_the_query_names_the_model() -> None:
    async with routed(two()) as router:
        answer = await router.client.post(
            "/v1/chat/completions", params={"model": "two"}, json=CHAT
        )
        assert text_of(answer) == "second"
        props = (await router.client.get("/props", params={"model": "two"})).json()
        assert props["total_slots"] == 3


@pytest.mark.system
async def test_a_form_with_a_file_names_the_model() -> None:
    backends = {
        name: answering(name, projector=WordProjector(), n_ctx=1024) for name in ("one", "two")
    }
    async with routed(backends) as router:
        for name in ("one", "two"):
            answer = await router.client.post(
                "/v1/audio/transcriptions",
                data={"model": name, "stream": "true", "timeout": "30"},
                files={"file": wav_file(1.0)},
            )
            assert events_in(answer.text)[-1]["text"] == name
        broken = await router.client.post(
            "/v1/audio/transcriptions",
            content=b"--x",
            headers={"Content-Type": "multipart/form-data; boundary=x"},
        )
        assert broken.status_code == 400


async def test_a_stream_is_the_same_as_without_a_router() -> None:
    asked = {**CHAT, "model": "one", "stream": True, "seed": 1}
    async with routed({"one": answering("Hello there")}) as router:
        answer = await router.client.post("/v1/chat/completions", json=asked)
    assert answer.headers["content-type"] == "text/event-stream"
    assert answer.headers["x-accel-buffering"] == "no"
    deltas = [event["choices"][0]["delta"] for event in events_in(answer.text)]
    assert "".join(delta.get("content") or "" for delta in deltas) == "Hello there"


async def test_a_model_that_is_not_there() -> None:
    async with routed(TWO) as router:
        known = "There is no model 'three'. The models are: one, two."
        for model, wanted in (
            ("three", error_body(known, "model", code="model_not_found")),
            (1, error_body("'model' must be a string.", "model")),
        ):
            answer = await router.client.post("/completion", json={"prompt": "a", "model": model})
            assert (answer.status_code, answer.json()) == (400, wanted)


async def test_what_has_no_route_goes_to_no_model() -> None:
    async with routed({"one": None}) as router:  # which would never answer
        for path in ("/nowhere", "/v1//models", "/v1//nowhere", "/models//x"):
            unknown = await router.client.get(router.url + path)
            assert (unknown.status_code, unknown.json()["error"]["type"]) == (
                404,
                "not_found_error",
            )
        wrong = await router.client.get("/v1/chat/completions")
        assert wrong.status_code == 405
        assert wrong.headers["allow"] == "POST"
        assert (await router.client.post("/completion", content=b"{")).status_code == 400


async def test_answers_are_those_of_the_model() -> None:
    async with routed() as router:
        answer = await router.client.post("/completion", json={"prompt": 1.5})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "prompt"
        # A body that is no object:
        answer = await router.client.post("/lora-adapters", json=[])
        assert (answer.status_code, answer.json()) == (200, {"success": True})
        # And none at all:
        slots = (await router.client.get("/slots")).json()
        assert [slot["id"] for slot in slots] == [0, 1]
        head = await router.client.head("/slots")
        assert (head.status_code, head.content) == (200, b"")


async def test_a_body_that_is_too_large() -> None:
    async with routed(max_body_size=100) as router:
        answer = await router.client.post("/completion", json={"prompt": "x" * 100})
        assert answer.status_code == 413


async def test_a_long_body() -> None:
    async with routed({"one": None, "two": answering("second")}) as router:
        long = {**CHAT, "ignored": "x" * 100_000, "model": "two"}
        assert text_of(await router.client.post("/v1/chat/completions", json=long)) == "second"


async def test_keys_are_asked_for_by_the_router() -> None:
    async with routed(api_keys=("secret",)) as router:
        wrong = await router.client.post("/completion", json={"prompt": "a"})
        assert wrong.status_code == 401
        assert (await router.client.get("/health")).status_code == 200
        right = await router.client.post(
            "/completion", json={"prompt": "a", "n_predict": 1}, headers={"X-Api-Key": "secret"}
        )
        assert right.status_code == 200


async def test_a_prefix_ends_at_the_router() -> None:
    async with routed(api_prefix="/llm") as router:
        assert (await router.client.get("/llm/slots")).status_code == 200
        assert (await router.client.get("/slots")).status_code == 404
        accepted = await router.client.post(
            "/llm/v1/chat/completions", json=CHAT, headers={"Prefer": "respond-async"}
        )
        location = accepted.headers["location"]
        assert location.startswith("/llm/v1/stream/")
        assert accepted.json() == {"location": location}
        assert (await router.client.get(location)).status_code == 200


async def test_requests_of_vertex_name_their_models() -> None:
    async with routed(two(), predict_route="/predict", health_route="/vertex") as router:
        assert (await router.client.get("/vertex")).json() == {"status": "ok"}
        instances = [
            {**CHAT, "@requestFormat": "chatCompletions", "model": m} for m in ("one", "two")
        ]
        answer = await router.client.post("/predict", json={"instances": instances})
        texts = [each["choices"][0]["message"]["content"] for each in answer.json()["predictions"]]
        assert texts == ["first", "second"]


# -- answers that another request began


async def test_control_is_for_the_model_that_knows_the_id() -> None:
    order = {"id": "none", "action": "cancel"}
    async with routed(two()) as router:
        answer = await router.client.post("/v1/chat/completions/control", json=order)
        wanted = {"success": False, "message": "no active completion for this id"}
        assert answer.json() == wanted
    async with routed({"one": None}) as router:  # and no model is loaded for it
        answer = await router.client.post("/v1/chat/completions/control", json=order)
        assert answer.status_code == 404


async def test_events_come_one_by_one() -> None:
    backend, gate = gated("abc")
    body = json.dumps({**CHAT, "stream": True}).encode()
    async with (
        routed({"one": backend}) as router,
        chunks_of(router.url, post("/v1/chat/completions", body)) as next_chunk,
    ):
        read = ""
        for text in ("a", "ab", "abc"):
            gate.allow(1)
            while text_in(read.encode()) != text:
                read += await next_chunk()
        gate.open()


# -- processes that end


async def died(path: str, body: dict[str, Any], *, begun: bool) -> httpx.Response:
    """Ask, and have the process die before it has answered, or after a part."""
    backend, gate = gated("x" * 100)
    async with routed({"one": backend}) as router, trio.open_nursery() as nursery:

        async def die() -> None:
            if begun:
                gate.allow(3)
                await until(lambda: len(router.processes["one"].server.engine_steps))
            await until(lambda: is_busy(router))
            router.processes["one"].die()
            gate.open()

        nursery.start_soon(die)
        return await router.client.post(path, json=body)




# -- clients that go away


async def test_a_client_that_goes_away_while_it_waits_is_forgotten() -> None:
    async with routed({"one": None}) as router:
        with patiently():
            async with connected(router.url) as stream:
                await stream.send_all(post("/completion", b"{}"))
                await router.service.n_forwarded.wait_value(1)
            await router.service.n_forwarded.wait_value(0)


