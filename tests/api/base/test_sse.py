"""Feeds, pings and the events of streams."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import Mock

import attrs
import pytest
import trio
from hypothesis import given, settings, strategies as st
from trio.testing import MockClock

from tests.support.json_values import JSON
from trioserve.api.base import reply, sse
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import EventSource
from trioserve.api.base.sse import PING
from trioserve.errors import DecodeError
from trioserve.types import Chunk, Finished, FinishReason, Timings


def finished() -> Finished:
    return Finished(task_id=1, reason=FinishReason.EOS, timings=Timings())


class FakeStream:
    """Events after pauses; an exception is raised."""

    def __init__(self, *script: tuple[float, Any]) -> None:
        self._script: Iterator[tuple[float, Any]] = iter(script)
        self._due: tuple[float, Any] | None = None

    async def next_event(self) -> Any:
        if self._due is None:
            pause, event = next(self._script)
            self._due = (trio.current_time() + pause, event)
        await trio.sleep_until(self._due[0])
        event, self._due = self._due[1], None
        if isinstance(event, Exception):
            raise event
        return event


class Names(sse.EventWriter[sse.Event]):
    """An encoder that writes what kind of event there was."""

    def encode(self, index: int, event: sse.Event) -> bytes:
        text = event.text if isinstance(event, Chunk) else "finished"
        return f"{index}:{text} ".encode() if text else b""

    def end(self) -> bytes:
        return b"end"


def on_error(error: Exception) -> bytes:
    return f"error {error}".encode()


@attrs.frozen
class FakePings(reply.Pings):
    """A wait in the queue, with a place for each look; then there is a slot."""

    queue: Any = None
    mailboxes: Any = ()
    places: list[bytes] = attrs.Factory(list)

    def is_queued(self) -> bool:
        return bool(self.places)

    async def comment(self) -> bytes:
        return self.places.pop(0) if self.places else PING


async def write(
    source: EventSource[sse.Event],
    interval: float = 30,
    places: Sequence[bytes] = (),
    tell_place: bool = False,
) -> list[bytes]:
    pings = FakePings(interval, tell_place=tell_place, places=list(places))
    answer = await reply.stream(source, Names(), pings, on_error)
    assert answer.keep_alive is not None and answer.keep_alive.interval == interval
    assert answer.headers["Cache-Control"] == "no-cache"
    return [part async for part in await answer.write()]


def a_caller() -> Caller:
    return Caller(request_id="any", path="/", arrived=0, held=Mock())


def test_events_are_lines_of_json() -> None:
    assert sse.event({"a": "é\n"}) == 'data: {"a":"é\\n"}\n\n'.encode()


async def test_a_stream_to_its_end(autojump_clock: MockClock) -> None:
    stream: Any = FakeStream((0, Chunk(1, "a", (1,))), (0, Chunk(1, "", (2,))), (0, finished()))
    assert await write(EventSource.of(stream.next_event)) == [b"0:a ", b"0:finished end"]


async def test_a_response_begins_with_a_ping_when_nothing_comes(
    autojump_clock: MockClock,
) -> None:
    stream: Any = FakeStream((70, Chunk(1, "a", (1,))), (10, finished()))
    assert await write(EventSource.of(stream.next_event)) == [PING, b"0:a ", b"0:finished end"]
    assert trio.current_time() == pytest.approx(80)


async def test_pings_can_be_off(autojump_clock: MockClock) -> None:
    stream: Any = FakeStream((1e6, finished()))
    assert await write(EventSource.of(stream.next_event), math.inf) == [b"0:finished end"]


async def test_the_place_in_the_queue_is_told_when_it_changes(autojump_clock: MockClock) -> None:
    stream: Any = FakeStream((10, Chunk(1, "a", (1,))), (0, finished()))
    places = [b"2nd", b"2nd", b"1st"]
    parts = await write(EventSource.of(stream.next_event), places=places, tell_place=True)
    assert parts == [b"2nd", b"1st", b"0:a ", b"0:finished end"]


async def test_a_place_is_told_at_a_ping(autojump_clock: MockClock) -> None:
    stream: Any = FakeStream((31, Chunk(1, "a", (1,))), (0, finished()))
    parts = await write(EventSource.of(stream.next_event), places=[b"2nd", b"1st"])
    assert parts == [b"2nd", b"0:a ", b"0:finished end"]


@pytest.mark.parametrize(("delay", "places"), [(0, [b"1st"]), (20, [])])
async def test_an_error_before_the_first_event_is_raised(
    autojump_clock: MockClock, delay: float, places: list[bytes]
) -> None:
    stream: Any = FakeStream((delay, DecodeError("no")))
    with pytest.raises(DecodeError):  # nothing was sent, so it has a status
        await write(EventSource.of(stream.next_event), places=places, tell_place=True)


async def test_an_error_later_is_an_event(autojump_clock: MockClock) -> None:
    stream: Any = FakeStream((0, Chunk(1, "a", (1,))), (0, DecodeError("no")))
    assert await write(EventSource.of(stream.next_event)) == [b"0:a ", b"error no"]
    stream = FakeStream((31, ValueError("odd")))
    assert await write(EventSource.of(stream.next_event)) == [PING, b"error odd"]


async def test_several_streams_come_as_they_are_ready(autojump_clock: MockClock) -> None:
    first: Any = FakeStream((2, Chunk(1, "a", (1,))), (2, finished()))
    second: Any = FakeStream((1, Chunk(1, "b", (1,))), (2, finished()))
    async with (caller := a_caller()).resources:
        source = await reply.open_source(caller, [first, second])
        parts = await write(source)
    assert parts == [b"1:b ", b"0:a ", b"1:finished ", b"0:finished end"]


async def test_an_error_of_one_ends_all(autojump_clock: MockClock) -> None:
    first: Any = FakeStream((1e6, finished()))
    second: Any = FakeStream((1, Chunk(1, "b", (1,))), (2, DecodeError("no")))
    async with (caller := a_caller()).resources:
        source = await reply.open_source(caller, [first, second])
        assert await write(source) == [b"1:b ", b"error no"]
    assert trio.current_time() == pytest.approx(3)


LONG = st.lists(st.integers() | st.text(max_size=3), max_size=40)


@settings(max_examples=50)
@given(JSON | LONG | st.dictionaries(st.text(max_size=3), LONG, max_size=3))
def test_json_in_steps_is_the_same(value: Any) -> None:
    assert "".join(sse.encode_in_steps(value)) == sse.encode(value)


def test_a_list_that_is_made_as_it_is_written() -> None:
    made: list[int] = []

    def write(number: int) -> dict[str, int]:
        made.append(number)
        return {"number": number}

    for n in (0, 1, 16, 100):
        items = sse.LazyList(write, range(n))
        text = sse.encode({"items": [{"number": number} for number in range(n)]})
        assert "".join(sse.encode_in_steps({"items": items})) == text
        assert sse.encode({"items": items}) == text
    steps = sse.encode_in_steps(sse.LazyList(write, range(1000)))
    made.clear()
    next(steps)
    assert len(made) < 20
    with pytest.raises(TypeError):
        sse.encode({"items": object()})
