"""From the engine's events to the mailboxes: what waits, who is paused, and who is cancelled."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, cast

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked
from trio_util import AsyncValue

from trioserve.errors import (
    DeadlineExceededError,
    EngineError,
    RequestEndedError,
    ServerClosingError,
    StalledReaderError,
)
from trioserve.server.dispatch import UNREAD_BYTES, Dispatcher, Mailbox, QueueLoad, size_of
from trioserve.types import (
    Admitted,
    CancelReason,
    Chunk,
    Chunks,
    EngineEvent,
    Event,
    Failed,
    Finished,
    FinishReason,
    Preempted,
    Progress,
    Returned,
    Timings,
    TokenProb,
    TokenProbs,
)

PROBS = TokenProbs(TokenProb(1, b"a", -1.0), (TokenProb(1, b"a", -1.0), TokenProb(2, b"b", -2.0)))


class Engine:
    """Records the commands, and returns the events that the test sets."""

    def __init__(self) -> None:
        self.failure: EngineError | None = None
        self.told: list[tuple[str, int]] = []
        self.events: list[EngineEvent | Chunks] = []
        self.rings = trio.Event()
        self.calls: list[tuple[Callable[[], object], Callable[[Any], object]]] = []

    def cancel(self, task_id: int) -> None:
        self.told.append(("cancel", task_id))

    def pause(self, task_id: int) -> None:
        self.told.append(("pause", task_id))

    def resume(self, task_id: int) -> None:
        self.told.append(("resume", task_id))

    def call(
        self,
        function: Callable[[], object],
        reply: Callable[[Any], object],
        *,
        slot_id: int | None,
    ) -> None:
        assert slot_id is None
        self.told.append(("call", 0))
        self.calls.append((function, reply))

    def make(self) -> Returned:
        function, reply = self.calls.pop()
        return Returned(reply, function())

    def take(self) -> list[EngineEvent | Chunks]:
        events, self.events = self.events, []
        return events

    async def wait(self) -> None:
        await self.rings.wait()
        self.rings = trio.Event()

    async def say(self, *events: EngineEvent | Chunks) -> None:
        self.events += events
        self.rings.set()
        await wait_all_tasks_blocked()


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def dispatcher(engine: Engine) -> Dispatcher:
    bridge = cast(Any, engine)
    return Dispatcher(
        cast(Any, engine), bridge, unread_tokens=4, stall_timeout=10, failure=AsyncValue(None)
    )


@asynccontextmanager
async def running(dispatcher: Dispatcher) -> AsyncIterator[None]:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(dispatcher.run)
        nursery.start_soon(dispatcher.watch)
        await wait_all_tasks_blocked()
        yield
        nursery.cancel_scope.cancel()


async def take(dispatcher: Dispatcher, mailbox: Mailbox) -> list[Event]:
    await mailbox.wait()
    events = mailbox.take_all()
    dispatcher.resume(mailbox)
    return events


def end_of(task_id: int) -> Finished:
    return Finished(task_id=task_id, reason=FinishReason.EOS, timings=Timings())


def loads(dispatcher: Dispatcher) -> list[tuple[int, int]]:
    every = (dispatcher.queued, dispatcher.queued_of("a"), dispatcher.queued_of("b"))
    return [(load.n_requests, load.n_tokens) for load in every]


async def test_what_waits_is_counted(engine: Engine, dispatcher: Dispatcher) -> None:
    one, two = dispatcher.open(1, 10, client="a"), dispatcher.open(2, 7, client="b")
    assert loads(dispatcher) == [(2, 17), (1, 10), (1, 7)]
    async with running(dispatcher):
        await engine.say(Admitted(1, 0.0), Admitted(1, 0.0))
        assert loads(dispatcher) == [(1, 7), (0, 0), (1, 7)] and not one.queued
        await engine.say(Preempted(1), Preempted(1), Preempted(99))
        assert loads(dispatcher) == [(2, 17), (1, 10), (1, 7)] and one.queued
    assert (len(dispatcher), dispatcher.mailboxes) == (2, (one, two))
    assert one.is_empty, "a reader has nothing of that"
    for mailbox in (one, two):
        dispatcher.close(mailbox)
    assert loads(dispatcher) == [(0, 0)] * 3 and len(dispatcher) == 0
    assert dispatcher.queued_of("c") == QueueLoad(0, 0)


@pytest.mark.parametrize("ends_before", [False, True])
async def test_a_task_is_cancelled_once_unless_it_has_ended(
    ends_before: bool, engine: Engine, dispatcher: Dispatcher
) -> None:
    mailbox = dispatcher.open(1, 1)
    if ends_before:
        mailbox.put(end_of(1))
    dispatcher.close(mailbox)
    dispatcher.end(mailbox, RequestEndedError("over"), CancelReason.CALLER)
    assert engine.told == ([] if ends_before else [("cancel", 1)])
    assert mailbox.cancel_reason is None


async def test_a_reader_that_is_ended_gets_the_error(
    engine: Engine, dispatcher: Dispatcher
) -> None:
    mailbox = dispatcher.open(1, 1)
    mailbox.put_token("x", 1)
    for reason in (CancelReason.CALLER, CancelReason.DEADLINE):
        dispatcher.end(mailbox, RequestEndedError("over"), reason)
    assert mailbox.cancel_reason is CancelReason.CALLER
    mailbox.put(Progress(1, 1, 0, 0, 0.0))  # dropped, as the tokens are
    async with running(dispatcher):
        await engine.say(Chunk(1, "y", (2,)))
    with pytest.raises(RequestEndedError):
        await take(dispatcher, mailbox)
    dispatcher.close(mailbox)
    assert engine.told == [("cancel", 1)]


@pytest.mark.parametrize(
    "chunks",
    [[Chunks([1] * 4, "abcd", [1, 2, 3, 4])], [Chunk(1, "", (1, 2, 3)), Chunk(1, "", (4,))]],
)
async def test_a_full_mailbox_pauses_its_task_until_it_is_read(
    chunks: list[Chunk | Chunks], engine: Engine, dispatcher: Dispatcher
) -> None:
    mailbox = dispatcher.open(1, 1)
    dispatcher.open(2, 1)
    async with running(dispatcher):
        await engine.say(Chunk(2, "", (1, 2, 3)), *chunks, Chunks([1, 3], "xx", [5, 5]))
        assert engine.told == [("pause", 1)] and mailbox.n_unread == 5
        assert len(await take(dispatcher, mailbox)) == (1 if len(chunks) == 1 else 3)
        assert engine.told == [("pause", 1), ("resume", 1)]
        assert (mailbox.n_unread, mailbox.n_bytes, mailbox.is_empty) == (0, 0, True)
        await engine.say(Chunk(1, "", (1,)))
        await take(dispatcher, mailbox)
    assert engine.told == [("pause", 1), ("resume", 1)]


@pytest.mark.parametrize(("n_bytes", "paused"), [(UNREAD_BYTES - 1, False), (UNREAD_BYTES, True)])
async def test_few_tokens_with_many_bytes_fill_it_too(
    n_bytes: int, paused: bool, engine: Engine, dispatcher: Dispatcher
) -> None:
    dispatcher.open(1, 1)
    async with running(dispatcher):
        await engine.say(Chunk(1, "x" * n_bytes, (1,)))
    assert engine.told == [("pause", 1)] * paused


def test_bytes_of_events_and_candidates_count() -> None:
    mailbox = Mailbox(1, 1)
    mailbox.put_token("abc", 1)
    mailbox.put(Chunk(1, "de", (2,), probs=(PROBS,)))
    assert (mailbox.n_unread, mailbox.n_bytes) == (2, 5 + 450)
    assert size_of((PROBS, PROBS)) == 900
    mailbox.put(Progress(1, 1, 0, 0, 0.0))
    assert mailbox.n_bytes == 605 and not mailbox.is_over
    mailbox.put(Failed(1, EngineError("over")))
    assert mailbox.n_bytes == 755 and mailbox.is_over


async def test_tokens_and_events_stay_in_their_order(dispatcher: Dispatcher) -> None:
    mailbox = dispatcher.open(1, 1)
    assert mailbox.is_empty
    mailbox.put_token("a", 1)
    assert not mailbox.is_empty
    mailbox.put_token("b", 2)
    middle = Progress(1, 1, 0, 0, 0.0)
    mailbox.put(middle)
    mailbox.put_token("c", 3)
    mailbox.put(end_of(1))
    events = [Chunk(1, "ab", (1, 2)), middle, Chunk(1, "c", (3,)), end_of(1)]
    assert await take(dispatcher, mailbox) == events


async def test_a_pace_makes_single_chunks(engine: Engine, dispatcher: Dispatcher) -> None:
    mailbox = dispatcher.open(1, 1)
    async with running(dispatcher):
        await engine.say(Chunks([1, 1], "ab", [1, 2], 0.5))
    expected = [Chunk(1, "a", (1,), pace=0.5), Chunk(1, "b", (2,), pace=0.5)]
    assert await take(dispatcher, mailbox) == expected


async def test_a_reader_that_stays_behind_is_given_up(
    engine: Engine, dispatcher: Dispatcher, autojump_clock: MockClock
) -> None:
    stuck, slow, late = (dispatcher.open(task_id, 1) for task_id in (1, 2, 3))
    async with running(dispatcher):
        await engine.say(Chunk(1, "", (1,) * 4), Chunk(2, "", (1,) * 5))
        await trio.sleep(9)
        await take(dispatcher, slow)
        await engine.say(Chunk(2, "", (1,) * 4), Chunk(3, "", (1,) * 4))
        await trio.sleep(2)
        assert (stuck.is_over, slow.is_over, late.is_over) == (True, False, False)
        assert stuck.cancel_reason is CancelReason.STALLED
        with pytest.raises(StalledReaderError, match="4 tokens were left unread for 10 seconds"):
            await take(dispatcher, stuck)
        dispatcher.close(late)
        await trio.sleep(9)
    assert slow.is_over and late.cancel_reason is None
    assert [task_id for what, task_id in engine.told if what == "cancel"] == [1, 3, 2]


async def test_a_pause_of_the_process_costs_readers_one_second(
    engine: Engine, dispatcher: Dispatcher, mock_clock: MockClock
) -> None:
    mailboxes = [dispatcher.open(task_id, 1) for task_id in (1, 2)]
    async with running(dispatcher):
        for task_id in (1, 2):
            await engine.say(Chunk(task_id, "", (1,) * 4))
            await wait_all_tasks_blocked()
            mock_clock.jump(0.1)
        for _ in range(9):
            await wait_all_tasks_blocked()
            mock_clock.jump(3600)
        await wait_all_tasks_blocked()
        assert [mailbox.is_over for mailbox in mailboxes] == [False, False]
        assert len(await take(dispatcher, mailboxes[0])) == 1
        mock_clock.jump(1)
        await wait_all_tasks_blocked()
        assert [mailbox.is_over for mailbox in mailboxes] == [False, True]


async def test_requests_that_have_ended_leave_no_deadlines(
    dispatcher: Dispatcher, autojump_clock: MockClock
) -> None:
    far = trio.current_time() + 10**6
    kept = [dispatcher.open(i, 1, deadline=far + i) for i in range(1000)]
    for i in range(1000, 20_000):
        dispatcher.close(dispatcher.open(i, 1, deadline=far))
    assert len(dispatcher._times) < 5000
    async with running(dispatcher):
        await trio.sleep_until(far + 500.5)
        assert [one.is_over for one in kept] == [i <= 500 for i in range(1000)]


async def test_deadlines(engine: Engine, dispatcher: Dispatcher, autojump_clock: MockClock) -> None:
    start = trio.current_time()
    late = dispatcher.open(1, 1, deadline=start + 20)
    async with running(dispatcher):
        soon = dispatcher.open(2, 1, deadline=start + 5)
        gone = dispatcher.open(3, 1, deadline=start + 5)
        never = dispatcher.open(4, 1, deadline=math.inf)
        dispatcher.close(gone)
        await trio.sleep(4.9)
        assert not soon.is_over
        await trio.sleep(0.2)
        assert soon.is_over and not late.is_over
        assert soon.cancel_reason is CancelReason.DEADLINE
        with pytest.raises(DeadlineExceededError):
            await take(dispatcher, soon)
        await trio.sleep(15)
        assert late.is_over and not never.is_over
    assert engine.told == [("cancel", 3), ("cancel", 2), ("cancel", 1)]


async def test_a_call_returns_what_its_function_does(
    engine: Engine, dispatcher: Dispatcher
) -> None:
    made: list[int] = []

    async def call(function: Callable[[], int]) -> None:
        made.append(await dispatcher.call(function))

    async def fail() -> None:
        with pytest.raises(ZeroDivisionError):
            await dispatcher.call(lambda: 1 // 0)

    async with running(dispatcher), trio.open_nursery() as nursery:
        nursery.start_soon(call, lambda: 5)
        await wait_all_tasks_blocked()
        await engine.say(engine.make())
        nursery.start_soon(fail)
        await wait_all_tasks_blocked()
        await engine.say(engine.make())
        nursery.start_soon(call, lambda: made.append(6) or 7)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    async with running(dispatcher):
        await engine.say(engine.make())
    assert made == [5], "a request that has left is not waited for"


async def test_a_mailbox_has_one_reader(engine: Engine, dispatcher: Dispatcher) -> None:
    mailbox = dispatcher.open(1, 1)
    refused: list[bool] = []

    async def take() -> None:
        try:
            await mailbox.wait()
        except trio.BusyResourceError:
            refused.append(True)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(take)
        nursery.start_soon(take)
        await wait_all_tasks_blocked()
        assert refused == [True]
        nursery.cancel_scope.cancel()


async def test_each_reader_has_an_error_of_its_own(engine: Engine, dispatcher: Dispatcher) -> None:
    mailboxes = [dispatcher.open(1, 1), dispatcher.open(2, 1)]
    engine.failure = EngineError("broken")
    engine.failure.__cause__ = KeyError("why")
    raised = []
    async with running(dispatcher):
        await engine.say()
    for mailbox in mailboxes:
        with pytest.raises(EngineError, match="broken") as caught:
            await take(dispatcher, mailbox)
        assert caught.value.__cause__ is engine.failure.__cause__
        raised.append(caught.value)
    assert len({id(one) for one in (*raised, engine.failure)}) == 3
    assert engine.failure.__traceback__ is None


async def test_no_call_waits_for_an_engine_that_stops(
    engine: Engine, dispatcher: Dispatcher
) -> None:
    made: list[int] = []
    refused: list[str] = []

    async def call() -> None:
        try:
            await dispatcher.call(lambda: made.append(1))
        except ServerClosingError:
            refused.append("closing")

    async with trio.open_nursery() as nursery:
        async with running(dispatcher):
            nursery.start_soon(call)
            await wait_all_tasks_blocked()
        nursery.start_soon(call)
        await wait_all_tasks_blocked()
        assert refused == ["closing", "closing"]
    assert engine.told == [("call", 0)]
    engine.make()
    assert made == []


async def test_a_failure_reaches_all_who_wait(engine: Engine, dispatcher: Dispatcher) -> None:
    waiting, done = dispatcher.open(1, 1), dispatcher.open(2, 1)
    async with running(dispatcher), trio.open_nursery() as nursery:

        async def call() -> None:
            with pytest.raises(EngineError):
                await dispatcher.call(lambda: None)

        nursery.start_soon(call)
        await engine.say(end_of(2))
        engine.failure = EngineError("broken")
        await engine.say()
        assert dispatcher._failure.value is engine.failure
    with pytest.raises(EngineError):
        await take(dispatcher, waiting)
    assert await take(dispatcher, done) == [end_of(2)]
    with pytest.raises(EngineError):
        await dispatcher.call(lambda: None)
    assert engine.told == [("call", 0)]
