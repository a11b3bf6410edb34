"""`alongside`, `Patience`, `Bell`, `Feed`, `Gate`, `Jobs`, `repeat` and `run_in_worker`."""

from __future__ import annotations

import gc
import threading
import weakref
from functools import partial

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from trioserve.concurrency import (
    TURN,
    Bell,
    Feed,
    Gate,
    Jobs,
    Patience,
    Phase,
    alongside,
    check_cancelled,
    deadline_scope,
    repeat,
    run_in_worker,
)
from trioserve.errors import (
    DeadlineExceededError,
    EngineError,
    ServerClosingError,
    TrioServeError,
)


async def fail_at_its_end() -> None:
    try:
        await trio.sleep_forever()
    finally:
        raise KeyError("function")


async def fail_at_once() -> None:
    await trio.lowlevel.checkpoint()
    raise KeyError("function")


async def test_an_exception_of_the_block_comes_out_as_it_is() -> None:
    with pytest.raises(ValueError, match="block"):
        async with alongside(trio.sleep_forever):
            raise ValueError("block")


async def test_when_both_fail_both_come_out() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with alongside(fail_at_its_end):
            raise ValueError("block")
    assert [repr(one) for one in caught.value.exceptions] == [
        "ValueError('block')",
        "KeyError('function')",
    ]


async def test_a_function_that_fails_cancels_the_block() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with alongside(fail_at_once):
            await trio.sleep_forever()
    assert [repr(one) for one in caught.value.exceptions] == ["KeyError('function')"]


@pytest.mark.parametrize("is_nested", [False, True])
async def test_both_cancelled_from_outside_is_cancelled_once(is_nested: bool) -> None:
    with trio.CancelScope() as scope:
        async with alongside(trio.sleep_forever):
            scope.cancel()
            if is_nested:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(trio.sleep_forever)
                    nursery.start_soon(trio.sleep_forever)
            await trio.sleep_forever()
    assert scope.cancelled_caught


@pytest.mark.parametrize("does_function_fail", [False, True])
async def test_an_exception_of_the_block_is_freed_without_the_collector(
    does_function_fail: bool,
) -> None:
    class BlockError(Exception):
        pass

    def make() -> BlockError:
        error = BlockError()
        made.append(weakref.ref(error))
        return error

    made: list[weakref.ref[BlockError]] = []
    gc.collect()
    gc.disable()
    try:
        try:
            async with alongside(fail_at_its_end if does_function_fail else trio.sleep_forever):
                raise make()
        except Exception:
            assert made[0]() is not None
        assert made[0]() is None
    finally:
        gc.enable()


async def test_what_a_failed_function_does_to_the_block_is_its_context() -> None:
    with pytest.raises(ExceptionGroup) as caught:
        async with alongside(fail_at_once):
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                raise ValueError("block") from None
    assert [repr(one) for one in caught.value.exceptions] == ["KeyError('function')"]
    assert repr(caught.value.__context__) == "ValueError('block')"


async def test_a_block_that_fails_while_all_is_cancelled_is_heard() -> None:
    with pytest.raises(ValueError, match="block"), trio.CancelScope() as scope:
        async with alongside(trio.sleep_forever):
            scope.cancel()
            try:
                await trio.sleep_forever()
            except trio.Cancelled:
                raise ValueError("block") from None


async def test_a_function_that_fails_while_all_is_cancelled_is_heard() -> None:
    with trio.CancelScope() as scope, pytest.RaisesGroup(KeyError, trio.Cancelled):
        async with alongside(fail_at_its_end):
            scope.cancel()
            await trio.sleep_forever()


# -- Bell


async def test_a_bell_wakes_all_that_wait_and_keeps_one_early_ring() -> None:
    bell, woken = Bell(), list[int]()

    async def wait(number: int) -> None:
        await bell.wait()
        woken.append(number)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait, 1)
        nursery.start_soon(wait, 2)
        await wait_all_tasks_blocked()
        bell.ring()
        bell.ring()
        await wait_all_tasks_blocked()
        assert sorted(woken) == [1, 2]
        bell.ring()
        await bell.wait()
        nursery.start_soon(wait, 3)
        await wait_all_tasks_blocked()
        assert sorted(woken) == [1, 2]
        bell.ring()


async def test_a_cancelled_wait_leaves_the_ring_to_the_next() -> None:
    bell = Bell()
    bell.ring()
    with trio.CancelScope() as scope:
        scope.cancel()
        await bell.wait()
    with trio.fail_after(1):
        await bell.wait()


# -- Feed


async def test_a_feed_gives_its_items_and_then_its_error() -> None:
    feed = Feed[int]()
    feed.put(1)
    feed.end(EngineError("broken"))
    feed.put(2)
    feed.end()
    assert await anext(feed) == 1
    with pytest.raises(EngineError, match="broken"):
        feed.check()
    with pytest.raises(EngineError, match="broken"):
        await anext(feed)


async def test_a_feed_that_ends_now_drops_what_is_unread() -> None:
    feed = Feed[int]()
    feed.put(1)
    feed.end(now=True)
    assert [item async for item in feed] == []


async def test_waiting_takes_nothing() -> None:
    feed = Feed[int]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.wait)
        await wait_all_tasks_blocked()
        feed.put(1)
    await feed.wait()
    assert await anext(feed) == 1
    feed.end()
    await feed.wait()


async def test_a_writer_waits_for_room_until_the_reader_took_an_item() -> None:
    feed, steps = Feed[int](1), list[str]()

    async def write() -> None:
        for number in range(3):
            await feed.room()
            feed.put(number)
            steps.append(f"put {number}")
        feed.end()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(write)
        await wait_all_tasks_blocked()
        assert steps == ["put 0"]
        assert [item async for item in feed] == [0, 1, 2]


async def test_room_by_the_size_of_items() -> None:
    feed = Feed[bytes](10, weigh=len)
    feed.put(b"123456789")
    await feed.room()
    feed.put(b"0")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.room)
        await wait_all_tasks_blocked()
        assert len(nursery.child_tasks) == 1
        assert await anext(feed) == b"123456789"
        await wait_all_tasks_blocked()
        assert not nursery.child_tasks


async def test_the_end_wakes_writers_that_wait_for_room(autojump_clock: MockClock) -> None:
    feed = Feed[int](1)
    feed.put(1)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(feed.room)
        await wait_all_tasks_blocked()
        feed.end()
        nursery.cancel_scope.deadline = trio.current_time() + 1
    assert not nursery.cancel_scope.cancelled_caught


async def test_a_feed_has_one_reader_and_a_cancelled_one_takes_nothing() -> None:
    feed = Feed[int]()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(anext, feed)
        await wait_all_tasks_blocked()
        with pytest.raises(trio.BusyResourceError):
            await anext(feed)
        nursery.cancel_scope.cancel()
    feed.put(1)
    assert await anext(feed) == 1


# -- Gate


async def test_a_gate_counts_and_drains() -> None:
    gate, order = Gate(), list[str]()

    async def work() -> None:
        with gate.open():
            await let_go.wait()
            order.append("worked")

    let_go = trio.Event()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        await wait_all_tasks_blocked()
        gate.refuse()
        with pytest.raises(ServerClosingError), gate.open():
            pytest.fail("admitted")
        with gate.inside(), gate.open():
            assert gate.n_open.value == 2
        let_go.set()
        await gate.drained()
        order.append("drained")
    assert order == ["worked", "drained"]


async def test_the_end_of_a_gate_gives_each_its_own_error() -> None:
    gate, errors = Gate(), list[BaseException]()
    with gate.open(errors.append), gate.open(errors.append):
        gate.end(EngineError("broken"))
    assert [str(error) for error in errors] == ["broken", "broken"]
    assert errors[0] is not errors[1]


async def test_the_end_of_a_gate_cancels_what_is_open_with_its_error() -> None:
    gate = Gate()

    async def work() -> None:
        with pytest.raises(EngineError, match="broken"), gate.open():
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work)
        nursery.start_soon(work)
        await wait_all_tasks_blocked()
        gate.end(EngineError("broken"))
        await gate.drained()
    with pytest.raises(EngineError), gate.open():
        pytest.fail("admitted")
    assert gate.phase.value is Phase.CLOSED


async def test_work_that_ends_itself_is_not_cancelled() -> None:
    gate, told = Gate(), list[str]()
    with gate.open(lambda error: told.append(error.message)):
        gate.end(ServerClosingError("closed now"))
        await trio.lowlevel.checkpoint()
    assert told == ["closed now"]


async def test_a_scope_around_the_gate_is_not_taken_for_its_end() -> None:
    gate = Gate()
    with trio.CancelScope() as scope, gate.open():
        scope.cancel()
        await trio.sleep_forever()
    assert scope.cancelled_caught
    assert gate.n_open.value == 0


# -- patience


async def test_patience_is_for_all_waits_together(autojump_clock: MockClock) -> None:
    patience = Patience(3.5)
    await patience.wait(partial(trio.sleep, TURN / 2))  # not a whole turn
    assert await patience.wait(trio.lowlevel.checkpoint) is None
    with pytest.raises(trio.TooSlowError):
        await patience.wait(trio.sleep_forever)
    assert trio.current_time() == TURN / 2 + 3.5
    with pytest.raises(trio.TooSlowError):
        await patience.wait(trio.lowlevel.checkpoint)


async def test_a_pause_of_the_process_costs_one_turn(mock_clock: MockClock) -> None:
    answered = trio.Event()

    async def wait() -> None:
        await Patience(3 * TURN).wait(answered.wait)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        for _ in range(2):
            await wait_all_tasks_blocked()
            mock_clock.jump(3600)
        await wait_all_tasks_blocked()
        answered.set()
    with pytest.raises(ExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            answered = trio.Event()
            nursery.start_soon(wait)
            for _ in range(3):
                await wait_all_tasks_blocked()
                mock_clock.jump(3600)
    assert caught.group_contains(trio.TooSlowError)


async def test_draining_a_gate_ends_what_takes_too_long(autojump_clock: MockClock) -> None:
    gate = Gate()

    async def work(seconds: float) -> None:
        with gate.open():
            await trio.sleep(seconds)

    async def be_ended() -> None:
        with pytest.raises(ServerClosingError, match="too late"):
            await work(100)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(work, 2)
        await wait_all_tasks_blocked()
        await gate.drain(trio.current_time() + 5, ServerClosingError("too late"))
        assert (trio.current_time(), gate.phase.value) == (2, Phase.DRAINING)
    gate = Gate()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(be_ended)
        await wait_all_tasks_blocked()
        await gate.drain(trio.current_time() + 5, ServerClosingError("too late"))
        assert (trio.current_time(), gate.phase.value) == (7, Phase.CLOSED)


# -- jobs


async def test_a_job_fails_alone() -> None:
    jobs, failures, other = Jobs(), list[TrioServeError](), trio.Event()

    async def fail(error: Exception) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.sleep_forever)
            raise error

    with capture_logs() as logged:
        async with alongside(jobs.run):
            jobs.begin(partial(fail, MemoryError("no more")), failures.append)
            jobs.begin(partial(fail, EngineError("foreseen")), failures.append)
            jobs.begin(partial(fail, KeyError("a")), lambda error: 1 / 0)
            await wait_all_tasks_blocked()
            jobs.begin(partial(_set, other))
            await other.wait()
    assert sorted(type(each).__name__ for each in failures) == ["EngineError", "TrioServeError"]
    assert "An unexpected error: MemoryError('no more')" in {each.message for each in failures}
    assert {type(each["exc_info"]).__name__ for each in logged} == {
        "MemoryError",
        "KeyError",
        "ZeroDivisionError",
    }


async def _set(event: trio.Event) -> None:
    event.set()


async def test_jobs_wait_for_their_beginning_and_are_refused_after_their_end() -> None:
    jobs, began, has_ended = Jobs(), trio.Event(), trio.Event()

    async def job() -> None:
        began.set()
        try:
            await trio.sleep_forever()
        finally:
            has_ended.set()

    jobs.begin(job)
    await wait_all_tasks_blocked()
    assert not began.is_set() and not jobs.have_begun
    async with alongside(jobs.run):
        await began.wait()
    assert has_ended.is_set()
    with pytest.raises(ServerClosingError):
        jobs.begin(job)


async def test_rounds_continue_after_one_that_fails(autojump_clock: MockClock) -> None:
    n_rounds, enough = 0, trio.Event()

    async def work() -> None:
        nonlocal n_rounds
        n_rounds += 1
        await trio.sleep(1)
        if n_rounds == 5:
            enough.set()
        raise (OSError if n_rounds % 2 else EngineError)("no")

    async with alongside(partial(repeat, work)):
        await enough.wait()


# -- worker threads


async def test_a_thread_learns_that_its_caller_is_cancelled() -> None:
    begun, ended = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        try:
            while True:
                check_cancelled()
                ended.wait(0.001)
        finally:
            ended.set()

    async def cancel() -> None:
        await trio.to_thread.run_sync(begun.wait)
        scope.cancel()

    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            nursery.start_soon(cancel)
            await trio.to_thread.run_sync(work)
    assert scope.cancelled_caught
    assert ended.is_set()
    check_cancelled()  # on the event loop it has no effect


# -- deadline_scope


async def test_a_deadline_has_its_message(autojump_clock: MockClock) -> None:
    for deadline in (-1.0, trio.current_time() + 1):
        with (
            pytest.raises(DeadlineExceededError, match=r"^The tool is slow\.$"),
            deadline_scope(deadline, "The tool is slow."),
        ):
            await trio.sleep(5)


async def test_cleanup_is_done_without_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[int] = []

    async def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("can't start new thread")

    await run_in_worker(lambda: done.append(threading.get_ident()))
    assert done != [threading.get_ident()]
    monkeypatch.setattr(trio.to_thread, "run_sync", refuse)
    await run_in_worker(lambda: done.append(threading.get_ident()))
    assert done[1:] == [threading.get_ident()]


async def test_what_cleanup_raises_is_raised() -> None:
    with pytest.raises(RuntimeError, match="its own"):
        await run_in_worker(partial(_fail, RuntimeError("its own")))


def _fail(error: Exception) -> None:
    raise error
