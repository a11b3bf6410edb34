"""Requests that wait for their model: their events and their time limit."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
import trio

from tests.support.clients import events_in, named_events_in
from tests.support.fake_fleet import Routed, routed
from tests.support.http_server import chunks_of, post
from tests.support.scripts import CHAT, answering
from tests.support.waiting import until
from trioserve.errors import ModelLoadError
from trioserve.router.states import QueueStatus, Status

ASK = {"prompt": "a"}
STREAM = {**CHAT, "stream": True}
TELLING = {**STREAM, "queue_comments": True}


def streaming(
    router: Routed, body: dict[str, Any], path: str = "/v1/chat/completions"
) -> AbstractAsyncContextManager[Callable[[], Awaitable[str]]]:
    """Ask for a stream; gives what waits for its next part."""
    return chunks_of(router.url, post(path, json.dumps(body).encode()))


@pytest.mark.system
async def test_a_stream_tells_where_it_stands() -> None:
    async with routed({"one": None}) as router:
        fleet = router.fleet
        fleet.news = [QueueStatus(position=1, status=Status.UNLOADED)]
        async with streaming(router, TELLING) as next_chunk:
            assert await next_chunk() == ": waiting for the model, position 2\n\n"
            fleet.news = [QueueStatus(position=0, status=Status.LOADING, progress=0.5)]
            fleet.change()
            assert await next_chunk() == ": loading the model, 50%\n\n"
            await router.load("one", answering("Hello"))
            rest = ""
            while not rest.endswith("data: [DONE]\n\n"):
                rest += await next_chunk()
        deltas = [event["choices"][0]["delta"] for event in events_in(rest)]
        assert "".join(delta.get("content") or "" for delta in deltas) == "Hello"


@pytest.mark.system
async def test_a_stream_that_does_not_ask_gets_pings() -> None:
    async with routed({"one": None}) as router:
        router.fleet.news = [QueueStatus(position=0, status=Status.LOADING, progress=0.25)]
        async with streaming(router, {**STREAM, "sse_ping_interval": 0.1}) as next_chunk:
            for _ in range(3):
                assert await next_chunk() == ": loading the model, 25%\n\n"


@pytest.mark.system
async def test_a_stream_that_is_stored_tells_where_it_stands() -> None:
    path, body = "/v1/responses", {**TELLING, "input": "Hi"}
    async with routed({"one": None}) as router:
        router.fleet.news = [QueueStatus(position=1, status=Status.UNLOADED)]
        async with streaming(router, body, path) as next_chunk:
            assert await next_chunk() == ": waiting for the model, position 2\n\n"
            await router.load("one", answering("Hello"))
            rest = ""
            while "event: response.completed" not in rest:
                rest += await next_chunk()
        response = json.loads(rest.rpartition("\ndata: ")[2])["response"]
        assert (await router.client.get(f"{path}/{response['id']}")).json() == response


async def test_a_response_in_the_background_says_why_its_model_cannot_be_loaded() -> None:
    async with routed({"one": None}) as router:
        body = {"input": "Hi", "background": True, "queue_comments": True}
        made = (await router.client.post("/v1/responses", json=body)).json()
        assert made["status"] == "queued"
        router.fleet.failures["one"] = ModelLoadError("It is broken.")
        router.fleet.change()
        await until(lambda: not router.service.stored_runs)
        found = (await router.client.get(f"/v1/responses/{made['id']}")).json()
        assert (found["status"], found["error"]["message"]) == ("failed", "It is broken.")


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_model_that_cannot_be_loaded(body: dict[str, Any]) -> None:
    async with routed({"one": None}) as router:
        router.fleet.failures["one"] = ModelLoadError("It is broken.")
        answer = await router.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == "It is broken."


async def test_a_model_that_cannot_be_loaded_after_the_answer_has_begun() -> None:
    async with routed({"one": None}) as router:
        router.fleet.news = [QueueStatus(position=0, status=Status.LOADING)]
        async with streaming(router, TELLING, "/v1/messages") as next_chunk:
            assert await next_chunk() == ": loading the model\n\n"
            router.fleet.failures["one"] = ModelLoadError("It is broken.")
            router.fleet.change()
            (event,) = named_events_in(await next_chunk())
            assert event["error"]["message"] == "It is broken."


async def test_refusals_after_the_answer_has_begun() -> None:
    body = {**TELLING, "messages": [{"role": "user", "content": "long " * 2000}]}
    async with routed({"one": None}) as router, streaming(router, body) as next_chunk:
        assert await next_chunk() == ":\n\n"
        await router.load("one", answering("Hello"))
        (event,) = events_in(await next_chunk(), done=False)
        assert event["error"]["code"] == "context_length_exceeded"


async def test_invalid_requests_are_refused_before_loading() -> None:
    async with routed({"one": None}) as router:
        answer = await router.client.post("/v1/chat/completions", json={**STREAM, "messages": 5})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")


async def test_a_request_may_do_without_loading() -> None:
    async with routed({"one": None}) as router:
        for autoload in ("false", "0"):
            answer = await router.client.post(f"/completion?autoload={autoload}", json=ASK)
            assert answer.status_code == 400
            assert "not loaded" in answer.json()["error"]["message"]
        for method, path in (("POST", "/completion"), ("GET", "/slots"), ("GET", "/props")):
            given = {"model": "one", "autoload": "maybe"}
            answer = await router.client.request(method, path, params=given)
            assert (answer.status_code, answer.json()["error"]["param"]) == (400, "autoload")
        for query in ("?model=one", "?model=one&autoload=true"):
            for path in ("/props", "/slots", "/metrics"):
                answer = await router.client.get(path + query)
                assert answer.status_code == 400, "a GET loads no model"
                assert "not loaded" in answer.json()["error"]["message"]
    async with routed({"one": None}, models_autoload=False) as router:
        answer = await router.client.post("/completion", json=ASK)
        assert (answer.status_code, "not loaded" in answer.text) == (400, True)


# -- deadlines


async def test_a_deadline_holds_while_the_model_loads() -> None:
    async with routed({"one": None}) as router:
        for body, headers in (
            ({**CHAT, "timeout": 0.05}, {}),
            ({**STREAM, "timeout": 0.05}, {}),
            (CHAT, {"X-Request-Timeout": "0.05"}),
        ):
            answer = await router.client.post("/v1/chat/completions", json=body, headers=headers)
            assert answer.status_code == 504
            assert answer.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.system
async def test_a_deadline_after_the_answer_has_begun() -> None:
    async with routed({"one": None}) as router:
        answer = await router.client.post("/v1/chat/completions", json={**TELLING, "timeout": 0.3})
        assert answer.status_code == 200
        comment, event = answer.text.split("\n\n", 1)
        assert comment == ":"
        (error,) = events_in(event, done=False)
        assert error["error"]["code"] == "deadline_exceeded"


# -- processes that end while requests wait for them


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_those_who_wait_get_the_next_process(body: dict[str, Any]) -> None:
    async with routed({"one": answering("first")}) as router, trio.open_nursery() as nursery:
        router.processes["one"].die()
        await router.fleet.children.pop("one").ended.wait()
        texts = list[str]()

        async def ask() -> None:
            answer = await router.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            texts.append(answer.text)

        for _ in range(3):
            nursery.start_soon(ask)
        await router.service.n_lent.wait_value(3)
        await router.load("one", answering("Hello"))
        await until(lambda: len(texts) == 3)
    assert all("model_process_ended" not in text for text in texts)


async def test_a_request_to_a_process_that_has_just_died_gets_an_error() -> None:
    async with routed({"one": answering("first")}) as router:
        router.processes["one"].die()
        await router.fleet.children["one"].ended.wait()
        answer = await router.client.post("/v1/chat/completions", json=CHAT)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_process_ended")
