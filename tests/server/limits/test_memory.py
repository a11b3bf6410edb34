"""The memory that all requests together may hold."""

from __future__ import annotations

import json
import tracemalloc
from contextlib import AsyncExitStack, ExitStack

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.scripted_server import assert_at_rest, serve
from tests.support.waiting import patiently
from trioserve.concurrency import alongside
from trioserve.errors import MemoryFullError, PayloadTooLargeError
from trioserve.server.limits import memory
from trioserve.server.limits.memory import BYTES_PER_TOKEN, MemoryBudget, weight_of
from trioserve.testing import ScriptedBackend

BODIES = {
    "text": json.dumps({"messages": [{"role": "user", "content": "word " * 20_000}]}),
    "wide text": json.dumps({"content": "word " * 20_000 + "😀"}, ensure_ascii=False),
    "escaped wide text": json.dumps({"content": "word " * 20_000 + "😀"}),
    "lists": "[" + "[],[]," * 10_000 + "0]",
    "objects": "[" + "{},{}," * 10_000 + "0]",
    "numbers": json.dumps(list(range(1000, 21_000))),
    "small numbers": "[" + "1," * 30_000 + "1]",
    "names": json.dumps({f"n{i}": "v" for i in range(10_000)}),
    "messages": json.dumps([{"role": "user", "content": "Hi"}] * 3_000),
}


@pytest.mark.parametrize("name", BODIES)
def test_a_body_is_not_heavier_than_estimated(name: str) -> None:
    body = BODIES[name].encode()
    tracemalloc.start()
    value = json.loads(body)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert value
    assert held < weight_of(body) < 20 * held


def test_a_budget_is_taken_and_given_back() -> None:
    budget = MemoryBudget(100)
    with budget.hold() as one, budget.hold() as two:
        one.grow(60)
        with pytest.raises(MemoryFullError) as caught:
            two.grow(41)
        assert caught.value.retry_after >= 1
        two.grow(40)
        with pytest.raises(PayloadTooLargeError):  # to come back would not help
            two.grow(61)
        kept = two.detach()
        two.release()
        assert budget.n_held == 100
    assert budget.n_held == 40
    kept.release()
    kept.release()
    assert budget.n_held == 0


def test_one_key_leaves_room_for_another() -> None:
    budget = MemoryBudget(120, shared=True)
    with ExitStack() as stack:
        a, more_of_a, b, c = (stack.enter_context(budget.hold(key)) for key in ("a", "a", "b", ""))
        a.grow(50)
        with pytest.raises(PayloadTooLargeError):
            a.grow(11)
        more_of_a.grow(10)
        with pytest.raises(MemoryFullError, match="this API key hold 60 bytes"):
            more_of_a.grow(1)
        b.grow(40)
        with pytest.raises(MemoryFullError):
            b.grow(1)
        c.grow(15)
        c.belongs_to("c")
        assert budget.n_held == 115
    assert budget.n_held == 0
    assert not budget._held_by


async def test_prompts_that_wait_are_held() -> None:
    backend = ScriptedBackend(n_slots=1, n_ctx=8192)
    async with serve(backend, max_request_memory=2**20) as server:
        async with AsyncExitStack() as stack:
            with pytest.raises(MemoryFullError):
                for _ in range(10):
                    await stack.enter_async_context(server.stream_complete("x" * 5000))
            assert server.memory.n_held == 3 * 5000 * BYTES_PER_TOKEN
        assert server.memory.n_held == 0
        await assert_at_rest(server)
        assert await server.complete("x" * 5000, max_tokens=1)


async def test_what_was_freed_goes_back_to_the_system(monkeypatch: pytest.MonkeyPatch) -> None:
    trimmed: list[int] = []
    monkeypatch.setattr(memory, "_TRIM_DELAY", 0.0)
    monkeypatch.setattr("ctypes.CDLL", lambda _name: FakeLibrary(trimmed))
    budget = MemoryBudget(2**30)
    async with alongside(budget.keep_trim):
        for n_trims in (0, 1, 2):
            await wait_all_tasks_blocked()
            assert trimmed == [0] * n_trims
            for _ in range(10):  # one trim is for all of them
                with budget.hold() as held:
                    held.grow(1000)
            with patiently():
                while len(trimmed) == n_trims:
                    await trio.sleep(0.001)


class FakeLibrary:
    def __init__(self, trimmed: list[int]) -> None:
        self.malloc_trim = trimmed.append


async def test_candidates_that_are_kept_for_the_end_count() -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 2000, n_ctx=4096)
    async with serve(backend, max_request_memory=2**20) as server:
        async with server.stream_complete("a", n_probs=1) as stream:
            async for _ in stream:  # one that reads as it comes keeps nothing
                pass
        with pytest.raises(PayloadTooLargeError):
            await server.complete("a", n_probs=1)
        assert (await server.complete("a", n_probs=1, max_tokens=500)).probs
        await assert_at_rest(server)
