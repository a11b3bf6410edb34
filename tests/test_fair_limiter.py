"""`FairLimiter`: clients take turns, and a cancel at any await leaves it consistent."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest
import trio
from hypothesis import given, settings, strategies as st
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.cancellation import CancelAtStep
from trioserve.errors import QueueFullError
from trioserve.fair_limiter import FairLimiter, ThreadTime, current_client, set_client, working_for

#: Starts of each client: enough for unequal shares to show.
N_ROUNDS = 40


async def hold(limiter: FairLimiter, client: str, seconds: float, starts: list[str]) -> None:
    with working_for(client):
        async with limiter.place():
            starts.append(client)
            await trio.sleep(seconds)


def check_idle(limiter: FairLimiter) -> None:
    assert limiter.n_held == limiter.n_waiting == 0
    assert not limiter._held
    assert not limiter._waiting


@given(
    k=st.integers(1, 6),
    n_places=st.integers(1, 5),
    n_reserved=st.integers(0, 2),
    first_demand=st.integers(N_ROUNDS, 5 * N_ROUNDS),
)
@settings(max_examples=60, deadline=None)
def test_of_k_clients_with_unlimited_demand_each_gets_its_share_of_the_starts(
    k: int, n_places: int, n_reserved: int, first_demand: int
) -> None:
    """Whatever the first client asks for, the others get as many starts as it does."""
    n_each = max(1, n_places - n_reserved)
    starts: list[str] = []

    async def main() -> None:
        limiter = FairLimiter(n_places, n_each)
        async with trio.open_nursery() as nursery:
            for client in range(k):
                for _ in range(first_demand if client == 0 else N_ROUNDS):
                    nursery.start_soon(hold, limiter, f"client {client}", 1.0, starts)
                await wait_all_tasks_blocked()  # the first client comes long before the others
        check_idle(limiter)

    trio.run(main, clock=MockClock(autojump_threshold=0.0))
    # After the first places, until one of the others has had all of its turns. Trio shuffles tasks
    # that wake at the same time.
    contested = Counter(starts[n_places : n_places + k * (N_ROUNDS - 2)])
    assert max(contested.values()) - min(contested[f"client {i}"] for i in range(k)) <= 2 * n_places


@given(
    st.lists(
        st.tuples(st.integers(0, 3), st.floats(0.0, 3.0), st.floats(0.0, 3.0), st.floats(0.1, 9.0)),
        max_size=30,
    ),
    st.integers(1, 4),
    st.integers(1, 4),
)
@settings(max_examples=100, deadline=None)
def test_the_limits_hold_and_no_place_stays_free_while_a_task_may_have_it(
    jobs: Sequence[tuple[int, float, float, float]], n_places: int, n_each: int
) -> None:
    """Tasks come at any time, hold places for any time, and are cancelled at any time."""
    held: Counter[str] = Counter()

    async def job(
        limiter: FairLimiter, client: str, begin: float, seconds: float, limit: float
    ) -> None:
        set_client(client)
        await trio.sleep(begin)
        with trio.move_on_after(limit):
            async with limiter.place():
                held[client] += 1
                try:
                    assert held.total() <= n_places
                    assert held[client] <= n_each
                    await trio.sleep(seconds)
                finally:
                    held[client] -= 1

    async def watch(limiter: FairLimiter) -> None:
        while True:
            await trio.sleep(0.05)
            assert not any(map(limiter._may_start, limiter._waiting))

    async def main() -> None:
        limiter = FairLimiter(n_places, n_each)
        async with trio.open_nursery() as watching:
            watching.start_soon(watch, limiter)
            async with trio.open_nursery() as nursery:
                for client, *times in jobs:
                    nursery.start_soon(job, limiter, str(client), *times)
            watching.cancel_scope.cancel()
        check_idle(limiter)

    trio.run(main, clock=MockClock(autojump_threshold=0.0))


async def test_a_second_client_finds_a_place_while_the_first_one_has_all_of_its_own(
    mock_clock: MockClock,
) -> None:
    limiter = FairLimiter(3, 2)
    starts: list[str] = []
    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(hold, limiter, "many", 1e6, starts)
        await wait_all_tasks_blocked()
        assert starts == ["many"] * 2
        nursery.start_soon(hold, limiter, "one", 1e6, starts)
        await wait_all_tasks_blocked()
        assert starts == ["many", "many", "one"]
        nursery.cancel_scope.cancel()
    check_idle(limiter)


async def test_the_client_with_the_fewest_places_is_next(autojump_clock: MockClock) -> None:
    """Short work of one client does not wait for as many turns of long work."""
    limiter = FairLimiter(2)
    starts: list[str] = []
    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(hold, limiter, "long", 10.0, starts)
        await wait_all_tasks_blocked()
        for _ in range(4):
            nursery.start_soon(hold, limiter, "short", 1.0, starts)
        with trio.move_on_after(15.0):
            await trio.sleep_forever()
        # From when both have one of the two places, each keeps one. (Trio shuffles its tasks.)
        assert starts[:2] == ["long", "long"]
        assert sorted(starts[2:4]) == ["long", "short"]
        assert starts[4:] == ["short", "short", "short", "long"]


async def test_too_many_tasks_of_a_client_are_refused_and_those_of_others_are_not(
    autojump_clock: MockClock,
) -> None:
    limiter = FairLimiter(1, max_waiting=4)
    starts: list[str] = []
    await hold(limiter, "other", 8.0, starts)  # so the limiter knows how long work takes
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(hold, limiter, "many", 8.0, starts)
        await wait_all_tasks_blocked()
        with pytest.raises(QueueFullError, match="1 running and 4 waiting") as caught:
            await hold(limiter, "many", 1.0, starts)
        assert caught.value.retry_after == 32
        nursery.start_soon(hold, limiter, "other", 8.0, starts)
    assert starts == ["other", "many", "many", "other", "many", "many", "many"]


async def test_a_cancel_at_any_await_leaves_it_consistent(autojump_clock: MockClock) -> None:
    limiter = FairLimiter(1)

    async def use() -> None:
        with working_for("a"):
            async with trio.open_nursery() as nursery:
                for _ in range(3):
                    nursery.start_soon(hold, limiter, "a", 1.0, [])
                nursery.start_soon(hold, limiter, "b", 1.0, [])

    cancels = 0
    while True:
        cancel = CancelAtStep(cancels + 1)
        await cancel.run(use)
        check_idle(limiter)
        if cancel.steps <= cancels:
            break
        cancels += 1
    assert cancels > 10


async def test_a_place_that_was_handed_out_is_not_lost_by_a_cancel(mock_clock: MockClock) -> None:
    limiter = FairLimiter(1)
    starts: list[str] = []
    async with trio.open_nursery() as nursery:
        async with limiter.place():
            scope = await nursery.start(cancellable, partial(hold, limiter, "a", 1e6, starts))
            nursery.start_soon(hold, limiter, "b", 1e6, starts)
            await wait_all_tasks_blocked()
        scope.cancel()  # it has the place, and has not run since
        await wait_all_tasks_blocked()
        assert starts[-1] == "b"
        assert limiter.n_held == 1
        nursery.cancel_scope.cancel()
    check_idle(limiter)


async def cancellable(
    call: partial[object], task_status: trio.TaskStatus[trio.CancelScope]
) -> None:
    with trio.CancelScope() as scope:
        task_status.started(scope)
        await call()


# -- threads


class Block:
    """Work that lasts until `end` is set."""

    def __init__(self) -> None:
        self.end = threading.Event()
        self.begun = trio.Event()
        self._token = trio.lowlevel.current_trio_token()

    def __call__(self) -> str:
        self._token.run_sync_soon(self.begun.set)
        assert self.end.wait(60)
        return "done"


async def test_an_abandoned_thread_keeps_its_place_until_it_ends() -> None:
    limiter, block = FairLimiter(1), Block()
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(partial(limiter.run_sync, block, abandon_on_cancel=True))
            await block.begun.wait()
            nursery.cancel_scope.cancel()
        assert limiter.n_held == 1
    finally:
        block.end.set()
    await limiter.until_idle()
    check_idle(limiter)
    assert await limiter.run_sync(lambda: "next") == "next"


async def test_the_time_of_the_work_begins_with_the_work(mock_clock: MockClock) -> None:
    """The wait for the work of others does not count."""
    limiter = FairLimiter(1)
    ended: list[str] = []

    async def second() -> None:
        await limiter.run_sync(lambda: None, seconds=5.0)
        ended.append("second")

    async with trio.open_nursery() as nursery, limiter.place():
        nursery.start_soon(second)
        await wait_all_tasks_blocked()
        mock_clock.jump(1000.0)
        await wait_all_tasks_blocked()
        assert not ended
    assert ended == ["second"]


async def test_work_that_takes_too_long_is_abandoned(mock_clock: MockClock) -> None:
    limiter, block = FairLimiter(1), Block()

    async def tick() -> None:
        await block.begun.wait()
        mock_clock.jump(5.1)

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(tick)
            with pytest.raises(trio.TooSlowError):
                await limiter.run_sync(block, seconds=5.0, abandon_on_cancel=True)
    finally:
        block.end.set()
    await limiter.until_idle()
    check_idle(limiter)


async def test_an_error_of_the_work_is_raised_and_the_place_is_free() -> None:
    limiter = FairLimiter(1)

    def fail() -> None:
        raise KeyError("work")

    with pytest.raises(KeyError, match="work"):
        await limiter.run_sync(fail)
    check_idle(limiter)


async def test_the_cpu_time_of_a_thread_is_known_to_others() -> None:
    block, time = Block(), ThreadTime()

    def work() -> None:
        time.begin()
        while time.seconds < 0.02:
            pass
        block()

    assert time.seconds == 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(FairLimiter(1).run_sync, work)
        try:
            await block.begun.wait()
            assert time.seconds >= 0.02
        finally:
            block.end.set()


# -- the client


async def test_a_task_works_for_the_client_of_the_task_that_started_it() -> None:
    found: list[str] = []

    async def look() -> None:
        await trio.lowlevel.checkpoint()
        found.append(current_client())

    async with trio.open_nursery() as nursery:
        with working_for("a"):
            nursery.start_soon(look)
            with working_for(""):
                assert current_client() == "a"
            with working_for("b"):
                nursery.start_soon(look)
        assert current_client() == ""
    assert sorted(found) == ["a", "b"]
