"""Admission of requests: the queue's bounds for each API key, and the right to a priority."""

from __future__ import annotations

from contextlib import AsyncExitStack, nullcontext
from typing import Any, cast

import pytest

from tests.support.clients import client_of
from tests.support.configs import read, refused
from tests.support.scripted_server import serve
from tests.support.scripts import CHAT
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, QueueFullError, ServerClosingError
from trioserve.server import RequestContext, Server
from trioserve.server.generation.requests import Admission
from trioserve.server.keys import Keys
from trioserve.testing import ScriptedBackend

KEYS = ("one", "two")


def server_of(**config: object) -> Server:
    return serve(
        ScriptedBackend(lambda prompt: "x" * 900, n_slots=1), **{"api_keys": KEYS, **config}
    )


async def fill(server: Server, stack: AsyncExitStack, client: str, prompt: str = "x") -> int:
    """Send requests until one is refused; returns how many were let in."""
    for n in range(1000):
        try:
            await stack.enter_async_context(server.stream_complete(prompt, client=client))
        except QueueFullError:
            return n
    raise AssertionError("the queue has no bound")


@pytest.mark.parametrize(
    ("max_queue", "max_queue_per_key", "n_waiting"),
    [(10, 0, 5), (10, 3, 3), (10, 30, 10), (1, 0, 1), (0, 0, 0)],
)
async def test_a_key_fills_its_share_of_the_queue(
    max_queue: int, max_queue_per_key: int, n_waiting: int
) -> None:
    async with server_of(max_queue=max_queue, max_queue_per_key=max_queue_per_key) as server:
        async with AsyncExitStack() as stack:
            assert await fill(server, stack, "one") == 1 + n_waiting  # one of them runs
            n_left = min(max_queue - n_waiting, n_waiting)
            assert await fill(server, stack, "two") == n_left
        dispatcher = server.lifecycle.services.dispatcher
        assert dispatcher.queued.n_requests == dispatcher.queued.n_tokens == 0
        assert not dispatcher._queued_of


async def test_a_key_fills_its_share_of_the_tokens() -> None:
    async with server_of(max_queue_tokens=100) as server, AsyncExitStack() as stack:
        await stack.enter_async_context(server.stream_complete("runs", client="one"))
        assert await fill(server, stack, "one", "ten tokens") == 5
        with pytest.raises(QueueFullError, match=r"60 prompt tokens with this API key .* 50"):
            await server.complete("ten tokens", client="one")
        assert await fill(server, stack, "two", "ten tokens") == 5


async def test_each_prompt_of_a_request_takes_a_place() -> None:
    async with server_of(max_queue=20) as server:
        context, params = RequestContext("one"), await server.params({})
        async with server.stream_all(["x"] * 11, params, context=context):
            async with server.stream_complete("y", client="two"):
                pass
            with pytest.raises(QueueFullError, match="10 requests with this API key"):
                await server.complete("z", client="one")
        with pytest.raises(QueueFullError, match="with this API key"):
            async with server.stream_all(["x"] * 12, params, context=context):
                pass
        assert len(server.lifecycle.services.dispatcher) == 0


async def test_without_keys_there_is_one_bound() -> None:
    async with server_of(api_keys=(), max_queue=10) as server, AsyncExitStack() as stack:
        assert await fill(server, stack, "one") == 11
        assert await fill(server, stack, "two") == 0


# -- priority


async def test_a_priority_above_0_is_a_right() -> None:
    async with server_of(api_key_priority=(5,)) as server:
        for client, priority in (("one", 5), ("one", -100), ("two", 0), ("two", -1)):
            await server.complete("x", client=client, priority=priority, max_tokens=1)
        for client, priority in (("one", 6), ("two", 1), ("two", 100)):
            with pytest.raises(InvalidRequestError, match=f"'priority' is {priority}") as caught:
                await server.complete("x", client=client, priority=priority)
            assert caught.value.param == "priority"


async def test_without_keys_everybody_has_it() -> None:
    async with server_of(api_keys=()) as server:
        assert (await server.complete("x", priority=100, max_tokens=1)).text


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        ("/v1/chat/completions", CHAT, {"Prefer": "respond-async, wait=1"}),
        ("/completion", {"prompt": "a"}, {}),
        ("/v1/messages", {**CHAT, "max_tokens": 1}, {}),
        ("/v1/responses", {"input": "a"}, {}),
    ],
)
async def test_too_high_a_priority_is_a_400(
    path: str, body: dict[str, object], headers: dict[str, str]
) -> None:
    headers = {**headers, "Authorization": "Bearer two"}
    async with client_of(api_keys=KEYS, api_key_priority=(9,)) as client:
        answer = await client.post(path, json={**body, "priority": 9}, headers=headers)
    assert answer.status_code == 400
    assert "'priority'" in answer.json()["error"]["message"]


def test_waits_are_told_from_how_long_requests_took() -> None:
    dispatcher = cast(Any, None)
    admission = Admission(Config(), Keys(Config()), dispatcher, 2)
    assert admission.wait_s(3) is None and admission._retry_after() == 1
    admission.observe(4000)
    assert admission.wait_s(1) == 2 and admission.wait_s(3) == 6
    admission.observe(14_000)
    assert admission.wait_s(2) == pytest.approx(6) and admission._retry_after() == 3
    admission.observe(1000)
    assert admission.wait_s(2) == pytest.approx(5)


async def test_what_has_begun_may_end_while_the_server_drains() -> None:
    def check(*, has_begun: bool) -> str:
        try:
            with gate.inside(has_begun=True) if has_begun else nullcontext():
                gate.check()
                services.requests.check_room(RequestContext(), 1)
        except (ServerClosingError, QueueFullError) as error:
            return type(error).__name__
        return "open"

    async with serve(ScriptedBackend(n_slots=1, n_seqs=1), max_queue=0) as server:
        gate, services = server.lifecycle.gate, server.lifecycle.services
        said = [(check(has_begun=False), check(has_begun=True))]
        mailbox = services.dispatcher.open(1, 1)
        said.append((check(has_begun=False), check(has_begun=True)))
        gate.refuse()
        said.append((check(has_begun=False), check(has_begun=True)))
        gate.end()
        said.append((check(has_begun=False), check(has_begun=True)))
        services.dispatcher.close(mailbox)
    closing = "ServerClosingError"
    expected = [("open", "open"), ("QueueFullError", "open"), (closing, "open"), (closing, closing)]
    assert said == expected


def test_flags() -> None:
    config = read("--api-key", "a,b", "--api-key-priority", "5,0", "--max-queue-per-key", "7")
    assert config.api_key_priority == (5, 0)
    assert config.max_queue_per_key == 7
    assert "--api-key-priority" in refused("--api-key", "a", "--api-key-priority", "5,0")
    assert "--api-key-priority" in refused("--api-key", "a", "--api-key-priority", "101")
    assert Config().api_key_priority == ()


@pytest.mark.parametrize(
    ("limit", "message"),
    [(1, "1 request is waiting"), (2, "2 requests are waiting")],
)
async def test_how_many_wait_is_said_in_english(limit: int, message: str) -> None:
    async with server_of(max_queue=limit, api_keys=()) as server, AsyncExitStack() as stack:
        await fill(server, stack, "one")
        refusal = rf"^{message}, and the limit is {limit}\.$"
        with pytest.raises(QueueFullError, match=refusal) as caught:
            await server.complete("x", client="one")
        assert caught.value.retry_after >= 1
