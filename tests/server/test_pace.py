"""Tokens that have a pace come one by one, when they are due."""

from __future__ import annotations

from typing import Any, cast

import pytest
import trio
import trio.lowlevel
import trio.testing
from trio.testing import MockClock
from trio_util import AsyncValue

from trioserve.errors import RequestEndedError
from trioserve.server.dispatch import Dispatcher
from trioserve.server.limits.memory import MemoryBudget
from trioserve.server.stream import Stream
from trioserve.types import CancelReason, Chunk, Finished, FinishReason, Timings

PACE = 1.0
END = Finished(task_id=1, reason=FinishReason.EOS, timings=Timings())


@pytest.fixture
def stream() -> Stream:
    class NoEngine:
        def cancel(self, _task_id: int) -> None:
            pass

    engine = cast(Any, NoEngine())
    dispatcher = Dispatcher(
        engine, cast(Any, None), unread_tokens=99, stall_timeout=99, failure=AsyncValue(None)
    )
    return Stream((), dispatcher.open(1, 1), dispatcher, MemoryBudget(2**20).hold())


def say(stream: Stream, text: str, pace: float = PACE) -> None:
    for letter in text:
        stream.mailbox.put(Chunk(1, letter, (1,), pace=pace))


async def read(stream: Stream, seen: list[tuple[float, str]]) -> None:
    start, event = trio.current_time(), None
    while not isinstance(event, Finished):
        event = await stream.next_event()
        text = event.text if isinstance(event, Chunk) else "end"
        seen.append((pytest.approx(trio.current_time() - start, abs=0.001), text))


async def test_a_burst_comes_one_by_one(stream: Stream, autojump_clock: MockClock) -> None:
    seen: list[tuple[float, str]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, stream, seen)
        await trio.sleep(10)
        say(stream, "abc")
        await trio.sleep(3)
        say(stream, "d")
        await trio.sleep(10)
        say(stream, "e")
        await trio.sleep(0.5)
        say(stream, "f")
        await trio.sleep(10)
        stream.mailbox.put(END)
    times = [10, 11, 12, 13, 23, 24, 33.5]
    assert seen == list(zip(times, [*"abcdef", "end"], strict=True))


async def test_waking_up_late_delays_no_later_token(stream: Stream, mock_clock: MockClock) -> None:
    seen: list[tuple[float, str]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, stream, seen)
        await trio.testing.wait_all_tasks_blocked()
        say(stream, "abc")
        for seconds in (0.0, 1.3, 0.7):  # the second token is due after 1 second
            await trio.testing.wait_all_tasks_blocked()
            mock_clock.jump(seconds)
        await trio.testing.wait_all_tasks_blocked()
        stream.mailbox.put(END)
        mock_clock.jump(9)
    assert seen[:3] == [(0.0, "a"), (1.3, "b"), (2.0, "c")]


async def test_what_comes_after_the_prompts_brings_all_that_waits(
    stream: Stream, autojump_clock: MockClock
) -> None:
    seen: list[tuple[float, str]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, stream, seen)
        await trio.lowlevel.checkpoint()
        say(stream, "abcd")
        await trio.sleep(1.5)
        say(stream, "e", pace=0.0)
        await trio.sleep(10)
        say(stream, "fgh")
        stream.mailbox.put(END)
    assert seen == [(0, "a"), (1, "b"), (2, "cde"), (11.5, "fgh"), (11.5, "end")]


async def test_a_reader_that_is_late_gets_all_at_once(
    stream: Stream, autojump_clock: MockClock
) -> None:
    seen: list[tuple[float, str]] = []
    say(stream, "x" * 40)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, stream, seen)
        await trio.sleep(5)
        stream.mailbox.put(END)
    assert seen == [(0.0, "x" * 40), (5.0, "end")]


async def test_whoever_reads_to_the_end_need_not_wait(
    stream: Stream, autojump_clock: MockClock
) -> None:
    async with trio.open_nursery() as nursery:

        async def read_all() -> None:
            assert (await stream.read()).text == "abcdef"
            assert trio.current_time() - start < 1.1

        start = trio.current_time()
        nursery.start_soon(read_all)
        for part in ("abc", "def"):
            say(stream, part)
            await trio.sleep(0.5)
        stream.mailbox.put(END)


async def test_cancelling_a_wait_loses_nothing(stream: Stream, autojump_clock: MockClock) -> None:
    say(stream, "abc")
    texts = []
    for _ in range(4):
        with trio.move_on_after(0.6):
            event = await anext(stream)
            assert isinstance(event, Chunk)
            texts.append(event.text)
            await trio.sleep_forever()
    assert texts == ["a", "b", "c"]


async def test_a_request_that_was_ended_says_so_with_the_next_token(
    stream: Stream, autojump_clock: MockClock
) -> None:
    say(stream, "abc")
    assert await anext(stream)
    error = RequestEndedError("over")
    stream._source.end(stream.mailbox, error, CancelReason.CALLER)
    with trio.fail_after(1.3), pytest.raises(RequestEndedError):
        await anext(stream)


async def test_tokens_that_are_due_within_a_moment_come_together(
    stream: Stream, autojump_clock: MockClock
) -> None:
    seen: list[tuple[float, str]] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(read, stream, seen)
        await trio.lowlevel.checkpoint()
        say(stream, "abcdefg", pace=0.002)
        await trio.sleep(1)
        say(stream, "hi", pace=0.002)
        stream.mailbox.put(Chunk(1, "j", (1,), pace=0.0))
        stream.mailbox.put(END)
    assert [text for _, text in seen] == ["ab", "cd", "ef", "g", "hij", "end"]
    assert seen[3][0] == pytest.approx(0.012, abs=0.0005)
