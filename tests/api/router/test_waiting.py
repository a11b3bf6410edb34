"""Requests that wait for their model: what they are told, and for how long they wait."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from tests.support.clients import events_in, named_events_in
from tests.support.fake_fleet import Routed, routed
from tests.support.http_server import child_app, chunks_of, post
from tests.support.scripts import CHAT, answering
from tests.support.waiting import until
from trioserve.errors import ModelLoadError
from trioserve.router.states import QueueStatus, Status

STREAM = {**CHAT, "stream": True}
TELLING = {**STREAM, "queue_comments": True}


def streaming(
    router: Routed, body: dict[str, Any], path: str = "/v1/chat/completions"
) -> AbstractAsyncContextManager[Callable[[], Awaitable[str]]]:
    """Ask for a stream; gives what waits for its next part."""
    return chunks_of(router.url, post(path, json.dumps(body).encode()))


@pytest.mark.system
async def test_a_stream_tells_where_it_stands(tmp_path: Any) -> None:
    async with routed({"one": None}) as router:
        fleet = router.fleet
        fleet.news = [QueueStatus(position=1, status=Status.UNLOADED)]
        async with streaming(router, TELLING) as next_chunk:
            assert await next_chunk() == ": waiting for the model, position 2\n\n"
            fleet.news = [QueueStatus(position=0, status=Status.LOADING, progress=0.5)]
            fleet.change()
            assert await next_chunk() == ": loading the model, 50%\n\n"
            async with child_app(tmp_path / "one.sock", answering("Hello")):
                fleet.sockets["one"] = tmp_path / "one.sock"
                fleet.change()
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
async def test_a_stream_that_is_stored_tells_where_it_stands(tmp_path: Any) -> None:
    path, body = "/v1/responses", {**TELLING, "input": "Hi"}
    async with routed({"one": None}) as router:
        router.fleet.news = [QueueStatus(position=1, status=Status.UNLOADED)]
        async with streaming(router, body, path) as next_chunk:
            assert await next_chunk() == ": waiting for the model, position 2\n\n"
            async with child_app(tmp_path / "one.sock", answering("Hello")):
                router.fleet.sockets["one"] = tmp_path / "one.sock"
                router.fleet.change()
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


async def test_what_the_child_refuses_after_the_answer_has_begun(tmp_path: Any) -> None:
    async with (
        routed({"one": None}) as router,
        child_app(tmp_path / "one.sock", answering("Hello")),
        streaming(router, {**TELLING, "messages": 5}) as next_chunk,
    ):
        assert await next_chunk() == ":\n\n"
        router.fleet.sockets["one"] = tmp_path / "one.sock"
        router.fleet.change()
        (event,) = events_in(await next_chunk(), done=False)
        assert event["error"]["param"] == "messages"


async def test_a_request_may_do_without_loading() -> None:
    async with routed({"one": None}) as router:
        for autoload in ("false", "0"):
            answer = await router.client.post(f"/completion?autoload={autoload}", json={})
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
        assert (await router.client.post("/completion", json={})).status_code == 400


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


@attrs.frozen
class Dying:
    """A child that has just died: its socket is there, and nobody listens."""

    router: Routed

    def next(self, path: Path) -> None:
        """The router takes note of that, and has another one."""
        fleet = self.router.fleet
        fleet.ended.set()
        fleet.ended = trio.Event()
        fleet.sockets["one"] = path


@asynccontextmanager
async def dying(tmp_path: Path) -> AsyncIterator[Dying]:
    """A router that does not know yet that its child has died."""
    path = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
    async with routed({"one": path}) as router:
        yield Dying(router)


async def until_waiting(router: Routed) -> None:
    """Wait until a request was refused by the dead child, and has left its place there."""
    await until(lambda: router.service.n_forwarded and not router.fleet.users)


@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_request_that_a_dead_child_does_not_take_goes_to_the_next(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    async with dying(tmp_path) as child, child_app(tmp_path / "one.sock", answering("Hello")):
        router, texts = child.router, list[str]()

        async def ask() -> None:
            answer = await router.client.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
            texts.append(answer.text)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
            await until_waiting(router)
            child.next(tmp_path / "one.sock")
        assert all("model_process_ended" not in text for text in texts)
        assert len(texts) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="others do not tell what was not read")
@pytest.mark.parametrize("body", [CHAT, STREAM])
async def test_a_request_that_a_dying_child_has_not_read_goes_to_the_next(
    tmp_path: Path, body: dict[str, Any]
) -> None:
    path = tmp_path / "dying.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        async with (
            routed({"one": path}) as router,
            child_app(tmp_path / "one.sock", answering("Hello")),
            trio.open_nursery() as nursery,
        ):

            async def die() -> None:
                await trio.lowlevel.wait_readable(listener)
                listener.close()
                Dying(router).next(tmp_path / "one.sock")

            nursery.start_soon(die)
            answer = await router.client.post("/v1/chat/completions", json=body)
            # Where it is streamed, what comes first is up to how busy the machine is.
            assert (answer.status_code, '"content":"H' in answer.text) == (200, True)


async def test_a_stream_that_waits_for_the_next_child_gets_pings(tmp_path: Path) -> None:
    async with dying(tmp_path) as child, child_app(tmp_path / "one.sock", answering("Hello")):
        async with streaming(child.router, {**STREAM, "sse_ping_interval": 0.1}) as next_chunk:
            assert await next_chunk() == ":\n\n"
            child.next(tmp_path / "one.sock")
            rest = ""
            while not rest.endswith("data: [DONE]\n\n"):
                rest += await next_chunk()
        assert '"content":"H' in rest


async def test_a_deadline_counts_while_a_request_waits_for_the_next_child(tmp_path: Path) -> None:
    async with dying(tmp_path) as child:
        answer = await child.router.client.post(
            "/v1/chat/completions", json={**CHAT, "timeout": 0.1}
        )
        assert (answer.status_code, "deadline" in answer.text) == (504, True)


async def test_a_child_for_which_too_many_wait(tmp_path: Path) -> None:
    path = tmp_path / "busy.sock"
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as one:
        listener.bind(str(path))
        listener.listen(0)
        one.connect(str(path))
        async with routed({"one": path}) as router:
            answer = await router.client.post("/v1/chat/completions", json=CHAT)
            assert answer.status_code == 503
            assert "takes no requests" in answer.json()["error"]["message"]
