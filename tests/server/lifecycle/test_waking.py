"""Requests that wait for a server to wake. Time stands still unless a test moves it."""

from __future__ import annotations

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.cancellation import CancelAtStep
from tests.support.scripted_server import ScriptedLoader, assert_at_rest, complete_within
from tests.support.sleepers import cancel_when_blocked, falling_awake, n_loads, no_collection, wake
from trioserve.errors import DeadlineExceededError, ModelLoadError, QueueFullError, TrioServeError
from trioserve.server.lifecycle.sleep import ServerState

__all__ = ["no_collection"]


async def test_all_who_wait_share_one_load_and_go_on_in_order(mock_clock: MockClock) -> None:
    order: list[str] = []

    async def ask(prompt: str) -> None:
        order.append((await server.complete(prompt)).text)

    async with falling_awake() as (server, loader), trio.open_nursery() as nursery:
        for prompt in "abcdefghij":
            nursery.start_soon(ask, prompt)
            await wait_all_tasks_blocked()
        assert server.lifecycle.sleeping
        assert server.state is ServerState.LOADING
        loader.may_go_on.set()
    assert "".join(order) == "ABCDEFGHIJ"
    assert n_loads(loader) == 2


async def test_a_deadline_holds_while_it_wakes(mock_clock: MockClock) -> None:
    async with falling_awake() as (server, loader), trio.open_nursery() as nursery:
        nursery.start_soon(wake, server)

        async def ask() -> None:
            with pytest.raises(DeadlineExceededError):
                await complete_within(server, "a", 5)
            loader.may_go_on.set()

        nursery.start_soon(ask)
        await wait_all_tasks_blocked()
        mock_clock.jump(5.1)
    assert n_loads(loader) == 2


async def test_who_is_cancelled_does_not_take_it_from_the_others(mock_clock: MockClock) -> None:
    async with falling_awake() as (server, loader), trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(cancel_when_blocked, scope)
            await server.complete("a")
        assert scope.cancelled_caught
        nursery.start_soon(server.complete, "b")
        await wait_all_tasks_blocked()
        loader.may_go_on.set()
    assert n_loads(loader) == 2
    assert loader.n_begun == 2


async def test_too_many_wait(mock_clock: MockClock) -> None:
    config = {"max_queue": 1, "parallel": 1}
    async with falling_awake(**config) as (server, loader), trio.open_nursery() as nursery:
        nursery.start_soon(server.complete, "a")
        nursery.start_soon(server.complete, "b")
        await wait_all_tasks_blocked()
        with pytest.raises(QueueFullError, match="2 requests wait for the model") as caught:
            await server.complete("c")
        assert caught.value.retry_after > 0
        loader.may_go_on.set()


async def test_when_it_cannot_wake_all_are_told_and_the_next_one_tries_again(
    mock_clock: MockClock,
) -> None:
    errors: list[TrioServeError] = []

    async def fail() -> None:
        with pytest.raises(ModelLoadError, match="no such file") as caught:
            await server.complete("a")
        errors.append(caught.value)

    async with falling_awake() as (server, loader):
        with capture_logs() as logs:
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(fail)
                await wait_all_tasks_blocked()
                loader.failure = "no such file"
                loader.may_go_on.set()
        assert len(set(map(id, errors))) == 3  # no two tasks raise the same object
        assert loader.n_begun == 2
        assert server.lifecycle.sleeping
        assert [one["event"] for one in logs] == ["the model cannot be loaded again"]
        await fail()
        assert loader.n_begun == 3
        loader.failure = ""
        assert (await server.complete("a")).text == "A"
        await assert_at_rest(server)


async def test_cancelled_at_every_step(mock_clock: MockClock) -> None:
    """Whenever a request is cancelled that wakes the server, the next one is served."""
    loader = ScriptedLoader()
    async with loader.serve() as server:
        for n in range(1, 1000):
            await server.sleep()
            canceller = CancelAtStep(n)

            async def ask() -> None:
                assert (await server.complete("hi")).text == "HI"

            await canceller.run(ask)
            assert (await server.complete("ho")).text == "HO"
            await assert_at_rest(server)
            if not canceller.scope.cancelled_caught:
                break
    assert n > 3
    assert len(loader.backends) == loader.n_begun == n + 1
    assert all(backend.closed for backend in loader.backends)


async def test_sleep_cancelled_at_every_step(mock_clock: MockClock) -> None:
    loader = ScriptedLoader()
    async with loader.serve() as server:
        for n in range(1, 1000):
            canceller = CancelAtStep(n)
            await canceller.run(server.sleep)
            assert (await server.complete("hi")).text == "HI"
            await assert_at_rest(server)
            if not canceller.scope.cancelled_caught:
                break
    assert n > 1
    assert all(backend.closed for backend in loader.backends)
