"""Requests on their way through a router: to the right model, whole, and event by event."""

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
async def test_a_form_with_a_file_names_the_model_and_is_passed_on_as_it_is() -> None:
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


async def test_events_are_passed_on_one_by_one() -> None:
    step = trio.Event()

    async def play(stream: trio.SocketStream, request: bytes) -> None:
        await stream.send_all(SSE_HEAD + chunk(b"data: 1\n\n"))
        await step.wait()
        await stream.send_all(chunk(b"data: 2\n\n") + chunk(b""))

    async with (
        playing(play) as path,
        routed({"one": path}) as router,
        chunks_of(router.url, post("/completion", b'{"stream": true}')) as next_chunk,
    ):
        assert await next_chunk() == "data: 1\n\n"
        step.set()
        assert await next_chunk() == "data: 2\n\n"


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


async def test_what_the_child_answers_is_passed_on() -> None:
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


async def test_headers_of_the_request() -> None:
    requests: list[bytes] = []

    async def play(stream: trio.SocketStream, request: bytes) -> None:
        requests.append(request)
        await stream.send_all(
            b"HTTP/1.1 200 \r\nContent-Type: text/x\r\nX-More: a\r\nDate: never\r\n"
            b"Access-Control-Allow-Origin: *\r\nContent-Length: 2\r\n\r\nhi"
        )

    async with playing(play) as path, routed({"one": path}) as router:
        answer = await router.client.post(
            "/completion?a=%20b",
            json={"prompt": "a"},
            headers={
                "Authorization": "Bearer k",
                "Origin": "http://localhost:1",
                "X-Forwarded-For": "6.6.6.6",
                "X-Request-Id": "mine",
                "X-Request-Waited": "100",
            },
        )
    lines = requests[0].lower().split(b"\r\n")
    assert lines[0] == b"post /completion?a=%20b http/1.1"
    sent = dict(line.split(b": ", 1) for line in lines[1 : lines.index(b"")])
    assert sent[b"authorization"] == b"bearer k"
    assert sent[b"content-length"] == b"14"
    assert sent[b"host"] == b"localhost"
    assert sent[b"x-forwarded-for"] == b"127.0.0.1"
    assert sent[b"x-request-id"] == b"mine"
    assert 100 <= float(sent[b"x-request-waited"]) < 110  # there, and here
    assert b"origin" not in sent
    assert b"connection" not in sent

    assert answer.content == b"hi"
    assert answer.headers["content-type"] == "text/x"
    assert answer.headers["x-more"] == "a"
    assert answer.headers["x-request-id"] == "mine"
    assert answer.headers["date"] != "never"
    assert answer.headers["access-control-allow-origin"] == "http://localhost:1"


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


async def test_control_is_for_the_child_that_knows_the_id() -> None:
    order = {"id": "none", "action": "cancel"}
    async with routed(two()) as router:
        answer = await router.client.post("/v1/chat/completions/control", json=order)
        wanted = {"success": False, "message": "no active completion for this id"}
        assert answer.json() == wanted
    async with routed({"one": None}) as router:  # and no model is loaded for it
        answer = await router.client.post("/v1/chat/completions/control", json=order)
        assert answer.status_code == 404


# -- answers that are stored


async def test_a_response_is_not_over_before_its_stream_is() -> None:
    seen, events = [], [
        b'event: response.created\ndata: {"response": {"status": "in_progress"}}\n\n',
        b'event: response.completed\ndata: {"response": {"status": "completed"}}\n\n',
        b"data: [DONE]\n\n",
    ]  # fmt: skip

    async def pieces() -> AsyncIterator[bytes]:
        for event in events:
            yield event
            seen.append(passed.response and passed.response["status"])

    passed = PassedResponse(pieces=pieces(), content_type="text/event-stream")
    assert b"".join([piece async for piece in await passed.write()]) == b"".join(events)
    assert seen == ["in_progress"] * 3
    assert passed.response == {"status": "completed"}
    assert passed.end_of_stream == b"".join(events[1:])


# -- children that end


@pytest.mark.parametrize("sent", [b"", SSE_HEAD[:20]])
async def test_a_child_that_ends_before_its_answer(sent: bytes) -> None:
    async def play(stream: trio.SocketStream, request: bytes) -> None:
        await stream.send_all(sent)

    async with playing(play) as path, routed({"one": path}) as router:
        answer = await router.client.post("/completion", json={"stream": True})
        assert answer.status_code == 503
        assert answer.json()["error"] == {
            "code": "model_process_ended",
            "message": "The process of the model ended before it had answered.",
            "type": "unavailable_error",
            "param": None,
        }


async def broken_stream(path: str) -> str:
    async def play(stream: trio.SocketStream, request: bytes) -> None:
        await send(stream, SSE_HEAD, chunk(b"event: a\ndata: {}\n\n"), b"1f\r\ndata: half of")

    async with playing(play) as socket, routed({"one": socket}) as router:
        answer = await router.client.post(path, json={"stream": True})
    assert answer.text.startswith("event: a\ndata: {}\n\n")
    return answer.text.removeprefix("event: a\ndata: {}\n\n")


async def test_a_child_that_ends_in_its_stream() -> None:
    (event,) = events_in(await broken_stream("/v1/chat/completions"), done=False)
    assert event["error"]["code"] == "model_process_ended"
    (event,) = named_events_in(await broken_stream("/v1/messages"))
    assert (event["type"], event["error"]["type"]) == ("error", "overloaded_error")
    (event,) = named_events_in(await broken_stream("/v1/responses"))
    assert (event["type"], event["sequence_number"]) == ("error", 1)
    assert event["code"] == event["error"]["code"] == "model_process_ended"


async def test_a_child_that_ends_in_a_stream_of_lines() -> None:
    async def play(stream: trio.SocketStream, request: bytes) -> None:
        head = SSE_HEAD.replace(b"text/event-stream", b"application/x-ndjson")
        await send(stream, head, chunk(b'{"done":false}\n'), b'1f\r\n{"half":')

    async with playing(play) as path, routed({"one": path}) as router:
        answer = await router.client.post("/api/chat", json={})
    part, error = map(json.loads, answer.text.splitlines())
    assert part == {"done": False}
    assert error == {"error": "The process of the model ended before it had answered."}


async def test_a_child_that_ends_in_a_long_body() -> None:
    async def play(stream: trio.SocketStream, request: bytes) -> None:
        await send(stream, b"HTTP/1.1 200 \r\ncontent-length: 9000000\r\n\r\n", b"x" * 1000)

    async with playing(play) as path, routed({"one": path}) as router:
        with pytest.raises(httpx.TransportError):
            await router.client.post("/completion", json={})


# -- clients that go away


@pytest.mark.parametrize("answers", [b"", SSE_HEAD])
async def test_a_client_that_goes_away_closes_the_connection_to_the_child(answers: bytes) -> None:
    asked, closed = trio.Event(), trio.Event()

    async def play(stream: trio.SocketStream, request: bytes) -> None:
        await stream.send_all(answers)
        asked.set()
        assert await stream.receive_some() == b""
        closed.set()

    async with playing(play) as path, routed({"one": path}) as router:
        with patiently():
            async with connected(router.url) as stream:
                await stream.send_all(post("/completion", b'{"stream": true}'))
                await asked.wait()
                assert router.fleet.users == ["one"]
            await closed.wait()
            await router.service.n_forwarded.wait_value(0)
        assert router.fleet.users == []


async def test_a_client_that_goes_away_while_it_waits_is_forgotten() -> None:
    async with routed({"one": None}) as router:
        with patiently():
            async with connected(router.url) as stream:
                await stream.send_all(post("/completion", b"{}"))
                await router.service.n_forwarded.wait_value(1)
            await router.service.n_forwarded.wait_value(0)


async def test_a_drain_waits_for_requests() -> None:
    step = trio.Event()

    async def play(stream: trio.SocketStream, request: bytes) -> None:
        await step.wait()
        await stream.send_all(b"HTTP/1.1 200 \r\ncontent-length: 2\r\n\r\nhi")

    async with playing(play) as path, routed({"one": path}) as router:
        answers: list[Any] = []

        async def ask() -> None:
            answers.append((await router.client.post("/completion", json={})).text)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await router.service.n_forwarded.wait_value(1)
            nursery.start_soon(router.service.drain)
            await trio.testing.wait_all_tasks_blocked(0.05)
            refused = await router.client.post("/completion", json={})
            assert refused.status_code == 503
            step.set()
        assert answers == ["hi"]


async def test_a_long_answer_is_stored() -> None:
    part = {"type": "output_text", "text": "x" * 2**21, "annotations": []}
    item = {"type": "message", "id": "msg_1", "status": "completed", "content": [part]}
    body = json.dumps({"id": "resp_1", "status": "completed", "output": [item]}).encode()

    async def play(stream: trio.SocketStream, request: bytes) -> None:
        head = "HTTP/1.1 200 \r\ncontent-type: application/json\r\n"
        await send(stream, f"{head}content-length: {len(body)}\r\n\r\n".encode(), body)

    async with playing(play) as path, routed({"one": path}) as router:
        answer = await router.client.post("/v1/responses", json={"input": "Hi", "store": True})
        assert answer.json() == json.loads(body)
