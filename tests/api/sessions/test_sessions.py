"""Sessions: how they are found, how they end, and that their bounds hold."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Data, KeepAlive, Pieces, Reply, json as json_reply
from trioserve.api.base.routes import Route
from trioserve.api.openai.responses.routes import responses
from trioserve.api.sessions import Ask, Sessions, StreamSession
from trioserve.concurrency import alongside
from trioserve.config import Config
from trioserve.errors import QueueFullError, ServerClosingError, StreamStoppedError
from trioserve.fair_limiter import working_for
from trioserve.server.limits.memory import MemoryBudget

ROUTE = Route("POST", "/v1/responses", responses)

MEMORY = MemoryBudget(2**30)


class Writer:
    """A request whose reply has the events that a test writes."""

    def __init__(self) -> None:
        self.into, self.out = trio.open_memory_channel[bytes](1000)
        self.cancelled = False
        self.keep_alive: KeepAlive | None = None

    async def __call__(self, caller: Caller) -> Reply:
        return Pieces(
            pieces=self.pieces(), content_type="text/event-stream", keep_alive=self.keep_alive
        )

    async def pieces(self) -> AsyncGenerator[bytes, None]:
        try:
            async for piece in self.out:
                yield piece
        except trio.Cancelled:
            self.cancelled = True
            raise

    async def write(self, *parts: bytes) -> None:
        for part in parts:
            self.into.send_nowait(part)
        await wait_all_tasks_blocked()

    async def end(self) -> None:
        self.into.close()
        await wait_all_tasks_blocked()


@asynccontextmanager
async def opened(**config: Any) -> AsyncIterator[Sessions]:
    sessions = Sessions()
    async with alongside(partial(sessions.run, Config(**config))):
        await wait_all_tasks_blocked()
        yield sessions


def begin(
    sessions: Sessions,
    ask: Ask | None = None,
    *,
    key: str = "",
    conversation: str = "",
    secret: bool = False,
) -> StreamSession:
    caller = Caller.of_own(MEMORY.hold(), ROUTE.path, key)
    return sessions.start(caller, conversation, ROUTE, ask or Writer(), secret=secret)


def read(session: StreamSession) -> list[str]:
    """The events in the ring, without ids."""
    blocks = session.ring.read(session.ring.start, 2**30).decode().split("\n\n")[:-1]
    return [block.split("\n", 1)[-1] for block in blocks]


def last_error(session: StreamSession) -> dict[str, Any]:
    event: dict[str, Any] = json.loads(read(session)[-1].partition("data: ")[2])
    return event


async def test_a_stream_ends_with_its_request(autojump_clock: MockClock) -> None:
    async with opened() as sessions:
        writer = Writer()
        session = begin(sessions, writer, conversation="a", secret=True)
        assert len(session.secret) >= 32
        assert sessions.find("", "a") is sessions.find_secret(session.secret) is session
        assert not session.answered.is_set()
        await writer.write(b"data: 1\n\n", b":\n\n")
        assert session.answered.is_set()
        assert session.completed_at == 0
        await writer.end()
        assert session.ring.closed
        assert session.completed_at >= session.started_at > 0
        assert read(session) == ["data: 1", ":"]
        assert session.failure is None


async def test_one_conversation_has_one_stream(autojump_clock: MockClock) -> None:
    async with opened() as sessions:
        writer = Writer()
        old = begin(sessions, writer, conversation="a")
        await writer.write(b"data: 1\n\n", b"data: 2\n\n")
        new = begin(sessions, conversation="a")
        other = begin(sessions, key="another", conversation="a")
        await wait_all_tasks_blocked()
        assert writer.cancelled
        assert sessions.find("", "a") is new
        assert sessions.find("another", "a") is other
        assert last_error(old)["sequence_number"] == 2
        assert isinstance(old.failure, StreamStoppedError)
        assert sessions.n_bytes == 0  # of the old one, nothing counts any more


async def test_stopping_twice_or_too_late(autojump_clock: MockClock) -> None:
    async with opened() as sessions:
        writer = Writer()
        session = begin(sessions, writer, conversation="a")
        await writer.write(b"data: 1\n\n")
        await writer.end()
        sessions.stop(session, "late")
        sessions.stop(session, "later")
        await wait_all_tasks_blocked()
        assert session.failure is None
        assert sessions.find("", "a") is None
        assert list(sessions) == []


TEAPOT = {"code": 418, "message": "Tea?", "type": "teapot", "param": None}


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (json_reply({"error": TEAPOT}, status=418), "Tea?"),
        (Data(body=b"{}"), "The answer is not a stream."),
        (Data(body=b"hello"), "The answer is not a stream."),
    ],
)
async def test_an_answer_that_is_no_stream(
    reply: Reply, message: str, autojump_clock: MockClock
) -> None:
    async def answer(caller: Caller) -> Reply:
        return reply

    async with opened() as sessions:
        session = begin(sessions, answer)
        await session.answered.wait()
        assert not session.is_stream
        assert session.reply is reply
        assert last_error(session)["error"]["message"] == message


async def test_a_request_that_breaks_ends_its_own_stream_only(autojump_clock: MockClock) -> None:
    async def break_(caller: Caller) -> Reply:
        return Pieces(pieces=broken_pieces(), content_type="text/event-stream")

    async def broken_pieces() -> AsyncGenerator[bytes, None]:
        raise ZeroDivisionError("oh")
        yield b""

    async def refuse(caller: Caller) -> Reply:
        raise QueueFullError("No.")

    async with opened() as sessions:
        broken, refused, whole = begin(sessions, break_), begin(sessions, refuse), Writer()
        session = begin(sessions, whole)
        await whole.write(b"data: 1\n\n")
        assert last_error(broken)["message"].startswith("Internal error.")
        assert last_error(refused)["message"] == "No."
        await whole.end()
        assert read(session) == ["data: 1"]


async def test_the_end_of_the_server_ends_streams(autojump_clock: MockClock) -> None:
    async with opened() as sessions:
        writer = Writer()
        session = begin(sessions, writer)
        await writer.write(b"data: 1\n\n", b"data: hal")
    assert writer.cancelled
    assert session.ring.closed
    assert len(read(session)) == 2
    assert isinstance(session.failure, ServerClosingError)
    assert last_error(session)["message"] == session.failure.message
    with pytest.raises(ServerClosingError):
        begin(sessions)


# -- bounds


async def test_the_one_that_ended_first_goes_first(autojump_clock: MockClock) -> None:
    async with opened(stream_sessions=3) as sessions:
        writers = [Writer() for _ in range(3)]
        first, second, third = [begin(sessions, each) for each in writers]
        with pytest.raises(QueueFullError) as refused:
            begin(sessions)
        assert refused.value.retry_after >= 1
        await writers[1].end()
        await writers[0].end()
        for ended in (second, first):
            assert ended in list(sessions)
            begin(sessions)
            assert ended not in list(sessions)
        assert third in list(sessions)
        assert sessions.n_evicted == 2
        with pytest.raises(QueueFullError):
            begin(sessions)


async def test_of_several_keys_one_has_half(autojump_clock: MockClock) -> None:
    async with opened(stream_sessions=4, api_keys=("a", "b")) as sessions:
        writer = Writer()
        begin(sessions, writer, key="a")
        begin(sessions, key="a")
        with pytest.raises(QueueFullError, match="of this API key"):
            begin(sessions, key="a")
        kept = begin(sessions, key="b")
        await writer.end()
        begin(sessions, key="a")  # evicts its ended stream
        assert kept in list(sessions)


async def test_a_stream_that_is_refused_leaves_the_memory_to_its_request(
    autojump_clock: MockClock,
) -> None:
    async with opened(stream_sessions=1) as sessions:
        begin(sessions)
        with MEMORY.hold() as held:
            held.grow(1000)
            with pytest.raises(QueueFullError):
                sessions.start(Caller.of_own(held, ROUTE.path), "", ROUTE, Writer())
            assert held.n_bytes == 1000
        assert MEMORY.n_held == 0


async def test_pings_are_a_part_of_the_stream(autojump_clock: MockClock) -> None:
    async with opened() as sessions:
        writer = Writer()
        writer.keep_alive = KeepAlive.every(10)
        session = begin(sessions, writer)
        await writer.write(b"data: 1\n\n")
        await trio.sleep(25)
        await writer.write(b"data: 2\n\ndata: ")
        await trio.sleep(9)
        assert read(session) == ["data: 1", ":", ":", "data: 2"]
        await trio.sleep(2)
        await writer.write(b"3\n\n")
        await writer.end()
        await trio.sleep(100)
        assert read(session) == ["data: 1", ":", ":", "data: 2", ":", "data: 3"]


async def test_a_stream_is_kept_for_a_time(autojump_clock: MockClock) -> None:
    async with opened(stream_keep_seconds=10) as sessions:
        writers = [Writer(), Writer()]
        early, late = [begin(sessions, each, conversation=str(i)) for i, each in enumerate(writers)]
        await writers[0].write(b"data: 1\n\n")
        await writers[0].end()
        await trio.sleep(5)
        await writers[1].end()
        with late.reading():
            await trio.sleep(4.9)
            assert sessions.find("", "0") is early
            await trio.sleep(0.2)
            assert sessions.find("", "0") is None
            await trio.sleep(20)
            assert sessions.find("", "1") is late  # it has a reader
        await trio.sleep(11)
        assert list(sessions) == []
        assert sessions.n_bytes == 0
        assert sessions.n_evicted == 0


async def test_one_stream_is_bounded(autojump_clock: MockClock) -> None:
    async with opened(stream_bytes=4096) as sessions:
        writer = Writer()
        session = begin(sessions, writer)
        for _ in range(100):
            await writer.write(b"data: " + b"x" * 100 + b"\n\n")
            assert len(session.ring) == sessions.n_bytes <= 4096
        assert session.ring.end > 10_000


async def test_all_streams_are_bounded(autojump_clock: MockClock) -> None:
    async with opened(stream_bytes=4096, stream_total_bytes=8192) as sessions:
        finished, large, small = Writer(), Writer(), Writer()
        begin(sessions, finished, conversation="finished")
        begin(sessions, large, conversation="large")
        begin(sessions, small, conversation="small")
        event = b"data: " + b"x" * 100 + b"\n\n"
        await finished.write(*[event] * 30)
        await finished.end()
        for _ in range(30):
            await large.write(event)
        assert sessions.find("", "finished") is not None
        for _ in range(100):
            await large.write(event)
            await small.write(event)
            assert sessions.n_bytes <= 8192
        assert sessions.find("", "finished") is None
        assert sessions.n_evicted == 1
        sizes = [len(each.ring) for each in sessions]
        assert min(sizes) > 3000  # neither was left without


async def test_running_streams_share_the_bytes(autojump_clock: MockClock) -> None:
    async with opened(stream_bytes=4096, stream_total_bytes=4096) as sessions:
        writers = [Writer() for _ in range(8)]
        for each in writers:
            begin(sessions, each)
        for _ in range(30):
            for each in writers:
                await each.write(b"data: " + b"x" * 100 + b"\n\n")
                assert sessions.n_bytes <= 4096
        assert all(len(each.ring) >= 128 for each in sessions)
        assert sum(len(each.ring) for each in sessions) == sessions.n_bytes


async def test_one_client_does_not_make_the_server_forget_another(
    autojump_clock: MockClock,
) -> None:
    """The server forgets streams of the client that has more."""
    event = b"data: " + b"x" * 100 + b"\n\n"
    async with opened(stream_bytes=4096, stream_total_bytes=8192) as sessions:
        with working_for("few"):
            finished, running = Writer(), Writer()
            kept = [begin(sessions, finished), begin(sessions, running)]
        await finished.write(*[event] * 8)
        await finished.end()
        await running.write(*[event] * 8)
        before = [read(each) for each in kept]
        with working_for("many"):
            writers = [Writer() for _ in range(8)]
            for writer in writers:
                begin(sessions, writer)
        for writer in writers:
            await writer.write(*[event] * 40)
            await writer.end()
            assert sessions.n_bytes <= 8192
        assert sessions.n_evicted > 0
        assert [read(each) for each in kept] == before
        assert set(kept) <= set(sessions)


async def test_the_places_of_streams_are_shared_too(autojump_clock: MockClock) -> None:
    async with opened(stream_sessions=4) as sessions:
        with working_for("few"):
            writer = Writer()
            kept = begin(sessions, writer)
        await writer.end()
        with working_for("many"):
            writers = [Writer() for _ in range(3)]
            for each in writers:
                begin(sessions, each)
            with pytest.raises(QueueFullError):  # nothing that it may take from has ended
                begin(sessions)
            await writers[0].end()
            begin(sessions)
        assert kept in set(sessions)
        with working_for("other"):
            await writers[1].end()
            begin(sessions)
        assert kept in set(sessions)


# -- lookups and metrics


async def test_lookup_knows_models_behind_names(autojump_clock: MockClock) -> None:
    async with opened() as sessions:
        for name in ("a", "a::one", "a::two::x", "ab", "b:::c"):
            begin(sessions, conversation=name)
        begin(sessions, key="another", conversation="a")

        def names(*wanted: str) -> list[str | None]:
            return [each.conversation for each in sessions.lookup("", wanted)]

        assert names("a") == ["a", "a::one", "a::two::x"]
        assert names("a::two", "ab", "none", "") == ["a::two::x", "ab"]
        assert names("b", "b:") == ["b:::c"]
        assert names(*["a"] * 1000) == ["a", "a::one", "a::two::x"]
        assert len(sessions.lookup("another", ["a"])) == 1
