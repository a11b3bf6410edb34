"""Requests to a router: they reach the right model, and learn when its process has ended."""

from __future__ import annotations

import json
from typing import Any

import httpx
import numpy as np
import pytest
import trio

from tests.support.clients import error_body, events_in, named_events_in
from tests.support.event_source import gated, text_in
from tests.support.fake_fleet import routed
from tests.support.http_server import chunks_of, connected, post, slots_in_use
from tests.support.media_files import wav_file
from tests.support.model_processes import InName
from tests.support.paced_script import PacedScript
from tests.support.projectors import WordProjector
from tests.support.scripts import CHAT, ENDLESS, answering
from tests.support.waiting import patiently, until
from trioserve.testing import ScriptedBackend, ScriptedSpeaker, heard

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
        await router.service.n_lent.wait_value(0)
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


async def test_the_model_that_is_named_speaks() -> None:
    backends = {
        "one": ScriptedBackend(speaker=ScriptedSpeaker),
        "two": ScriptedBackend(speaker=lambda: ScriptedSpeaker(languages=())),
        "mute": ScriptedBackend(),
    }
    async with routed(backends) as router:
        body = {"input": "Hello there.", "response_format": "pcm"}
        for name in ("one", "two"):
            answer = await router.client.post("/v1/audio/speech", json={**body, "model": name})
            assert heard(np.frombuffer(answer.content, "<i2") / np.float32(2**15)) == body["input"]
            listed = await router.client.get("/v1/audio/voices", params={"model": name})
            assert [one["id"] for one in listed.json()["voices"]] == ["default"]
        wrong = await router.client.post(
            "/v1/audio/speech", json={**body, "model": "one", "language": "xx"}
        )
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "language")
        mute = await router.client.post("/v1/audio/speech", json={**body, "model": "mute"})
        assert mute.status_code == 501 and "--tts" in mute.text
        events = await router.client.post(
            "/v1/audio/speech", json={**body, "model": "one", "stream_format": "sse"}
        )
        assert '"output_tokens":12' in events.text
        await router.service.n_lent.wait_value(0)


async def test_a_model_that_is_not_there() -> None:
    async with routed(TWO) as router:
        known = "There is no model 'three'. The models are: one, two."
        for model, status, wanted in (
            ("three", 404, error_body(known, "model", code="model_not_found")),
            (1, 400, error_body("'model' must be a string.", "model")),
        ):
            answer = await router.client.post("/completion", json={"prompt": "a", "model": model})
            assert (answer.status_code, answer.json()) == (status, wanted)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", {**CHAT, "max_tokens": 5}),
        ("/api/chat", {**CHAT, "stream": False}),
        ("/api/generate", {"prompt": "a", "stream": False}),
    ],
)
async def test_the_only_model_answers_to_any_name_and_says_which_it_is(
    path: str, body: dict[str, Any]
) -> None:
    async with routed({"one": answering("first")}) as router:
        answer = await router.client.post(path, json={**body, "model": "gpt-4o"})
        assert (answer.status_code, answer.json()["model"]) == (200, "scripted")
        shown = await router.client.post("/api/show", json={"model": "gpt-4o"})
        assert shown.status_code == 404  # clients of Ollama pull it then


async def test_an_unknown_route_loads_no_model() -> None:
    async with routed({"one": None}) as router:  # which would never answer
        for path in ("/nowhere", "/v1//models", "/v1//nowhere", "/models//x"):
            unknown = await router.client.get(router.url + path)
            assert (unknown.status_code, unknown.json()["error"]["type"]) == (
                404,
                "not_found_error",
            )
        wrong = await router.client.get("/v1/messages")
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
        assert answer.json() == wanted


async def test_events_come_one_by_one() -> None:
    script = held("0123456789", at="0")
    body = json.dumps({**CHAT, "stream": True}).encode()
    async with (
        routed({"one": script.backend()}) as router,
        chunks_of(router.url, post("/v1/chat/completions", body)) as next_chunk,
    ):
        read = ""
        while not (text := text_in(read.encode())):
            read += await next_chunk()
        assert text != "0123456789"
        script.go_on()
        while text_in(read.encode()) != "0123456789":
            read += await next_chunk()


def held(answer: str, *, at: str) -> PacedScript:
    """A script that stops when its answer has come to a text."""
    script = PacedScript()
    script.answer = answer
    script.hold_at(at)
    return script


# -- processes that end


async def test_a_process_that_ends_before_its_answer() -> None:
    backend, gate = gated("a")
    async with routed({"one": backend}) as router, trio.open_nursery() as nursery:

        async def die() -> None:
            await until(lambda: gate.n_asked)
            router.processes["one"].die()
            gate.open()

        nursery.start_soon(die)
        answer = await router.client.post("/completion", json={"prompt": "a"})
        assert answer.status_code == 503
        assert answer.json()["error"] == {
            "code": "model_process_ended",
            "message": "The process of the model ended before it had answered.",
            "type": "unavailable_error",
            "param": None,
        }


async def broken_stream(path: str, content_type: str = "text/event-stream") -> str:
    """Read a stream whose process is killed."""
    script = held("~!@#^*+", at="~!@#")
    body = {**CHAT, "input": "Hi", "max_tokens": 100, "stream": True}
    read = ""
    async with routed({"one": script.backend()}) as router:
        request = post(path, json.dumps(body).encode())
        async with chunks_of(router.url, request, content_type) as next_chunk:
            while "#" not in read:
                read += await next_chunk()
            router.processes["one"].die()
            while "ended before it had answered" not in read:
                read += await next_chunk()
        script.go_on()
        await router.service.n_lent.wait_value(0)
    return read


async def test_a_process_that_ends_in_its_stream() -> None:
    *_, event = events_in(await broken_stream("/v1/chat/completions"), done=False)
    assert event["error"]["code"] == "model_process_ended"
    *_, event = named_events_in(await broken_stream("/v1/messages"))
    assert (event["type"], event["error"]["type"]) == ("error", "overloaded_error")
    *before, event = named_events_in(await broken_stream("/v1/responses"))
    assert (event["type"], event["sequence_number"]) == ("error", len(before))
    assert event["code"] == event["error"]["code"] == "model_process_ended"


async def test_a_process_that_ends_in_a_stream_of_lines() -> None:
    text = await broken_stream("/api/chat", "application/x-ndjson")
    *parts, error = map(json.loads, text.splitlines())
    assert all(part["done"] is False for part in parts)
    assert error == {"error": "The process of the model ended before it had answered."}


# -- clients that go away


async def test_a_client_that_goes_away_while_it_waits_is_forgotten() -> None:
    async with routed({"one": None}) as router:
        with patiently():
            async with connected(router.url) as stream:
                await stream.send_all(post("/completion", b'{"prompt": "a"}'))
                await router.service.n_lent.wait_value(1)
            await router.service.n_lent.wait_value(0)


@pytest.mark.parametrize("begun", [False, True])
async def test_a_client_that_goes_away_frees_the_slot(begun: bool) -> None:
    backend, gate = gated("x" * ENDLESS, n_ctx=4 * ENDLESS, n_ctx_seq=ENDLESS)
    async with routed({"one": backend}) as router:
        with patiently():
            async with connected(router.url) as stream:
                await stream.send_all(post("/completion", b'{"prompt": "a", "stream": true}'))
                await until(lambda: gate.n_asked)
                if begun:
                    gate.allow(5)
                    assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
                assert router.fleet.users == ["one"]
            await router.service.n_lent.wait_value(0)
            gate.open()
            await until(lambda: is_free(router.processes["one"]))
        assert router.fleet.users == []
        assert gate.n_asked < ENDLESS


async def is_free(process: InName) -> bool:
    return not await slots_in_use(process)


async def test_a_drain_waits_for_requests() -> None:
    backend, gate = gated("hi")
    async with routed({"one": backend}) as router:
        answers: list[Any] = []

        async def ask() -> None:
            answers.append((await router.client.post("/completion", json={"prompt": "a"})).json())

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await until(lambda: gate.n_asked)
            nursery.start_soon(router.service.drain)
            await until(lambda: router.fleet.calls)
            refused = await router.client.post("/completion", json={"prompt": "a"})
            assert refused.status_code == 503
            gate.open()
        assert [answer["content"] for answer in answers] == ["hi"]
