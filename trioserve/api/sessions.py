"""Streams that outlive the connections of their readers.

A `StreamSession` runs one request, whose reply it keeps as bytes. Any number of other requests read
it. `Sessions` finds sessions by name and enforces the limits: it evicts the
session that ended first, and refuses new sessions while too many are running.
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Set
from contextlib import aclosing, contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import structlog
import trio

from trioserve.api.base import errors, request_log
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Ending, KeepAlive, Reply, value_of
from trioserve.api.base.routes import Route
from trioserve.concurrency import Bell, Jobs, alongside, repeat
from trioserve.config import Config
from trioserve.errors import (
    InvalidRequestError,
    ModelLoadingError,
    NotSupportedError,
    QueueFullError,
    ServerClosingError,
    StreamStoppedError,
    raised_alone,
)
from trioserve.fair_limiter import current_client, set_client

# -- bytes


class OffsetError(InvalidRequestError):
    """A reader asks for bytes that the stream has discarded, or has not produced yet."""


#: Bytes in which events are counted at once, rather than looked at one by one: that takes 1 µs.
_PIECE = 2**14


class Ring:
    """Keeps whole events up to a limit in bytes, and discards the oldest beyond it.

    Offsets count bytes from the beginning of the stream. The ring holds the bytes from `start`,
    which is the beginning of an event, to `end`.

    Args:
        max_bytes: the limit.
        mark: the terminator of each event, which occurs nowhere else.
    """

    def __init__(self, max_bytes: int, mark: bytes) -> None:
        self.start = 0
        self.n_dropped = 0  # events with data
        self.closed = False  # True: no more events follow
        self.mark = mark
        self._max_bytes = max_bytes
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def end(self) -> int:
        """The length of the stream so far, in bytes."""
        return self.start + len(self._bytes)

    def append(self, events: bytes) -> None:
        """Add whole events. An event larger than the ring is discarded."""
        assert not self.closed and events.endswith(self.mark)
        self._bytes += events
        if len(self._bytes) > self._max_bytes:
            self.drop(len(self._bytes) - self._max_bytes)

    def drop(self, n_bytes: int) -> None:
        """Discard the oldest events: at least `n_bytes` bytes, and whole events only."""
        if n_bytes > 0:
            found = self._bytes.find(self.mark, max(n_bytes - len(self.mark), 0))
            n_bytes = len(self) if found < 0 else found + len(self.mark)
            self.n_dropped += self._count(0, n_bytes)
            del self._bytes[:n_bytes]
            self.start += n_bytes

    def check(self, offset: int, param: str | None = None) -> None:
        """Check that a reader can begin at an offset; `param` names the parameter that holds it.

        Raises:
            OffsetError: it is before `start` or after `end`.
        """
        if offset < self.start:
            raise OffsetError(
                f"Bytes {offset} to {self.start - 1} of the stream are no longer kept.", param=param
            )
        if offset > self.end:
            raise OffsetError(
                f"The stream has {self.end} bytes, and none at {offset}.", param=param
            )

    def is_boundary(self, offset: int) -> bool:
        """True if an event begins, or the next one will begin, at an offset in the ring."""
        before = offset - self.start
        begin = max(before - len(self.mark), 0)
        return before == 0 or self._bytes[begin:before] == self.mark

    def after(self, number: int, param: str) -> int:
        """Find the offset after an event, by its number: events with data count from 0.

        Raises:
            OffsetError: it is no longer kept, or not there yet; `param` holds the number.
        """
        if number < self.n_dropped:
            raise OffsetError.at(param, "is an event that is not kept.")
        at, n = 0, self.n_dropped
        while (end := self._bytes.find(self.mark, at + _PIECE)) >= 0:  # skip what is before it
            end += len(self.mark)
            if (n_then := n + self._count(at, end)) > number:
                break
            at, n = end, n_then
        while at < len(self):
            is_comment = self._bytes.startswith(b":", at)
            at = self._bytes.index(self.mark, at) + len(self.mark)
            if not is_comment and n == number:
                return self.start + at
            n += not is_comment
        raise OffsetError.at(param, f"is above {n - 1}, the last event so far.")

    def _count(self, first: int, last: int) -> int:
        """Count the events with data between two places where events begin."""
        piece = self.mark + self._bytes[first:last]
        return piece.count(self.mark) - 1 - piece.count(self.mark + b":")

    def read(self, offset: int, about: int) -> bytes:
        """Return the bytes from an offset to the end of an event: up to `about`, or one event.

        Returns empty bytes when the stream has no more events yet. Raises as `check`.
        """
        self.check(offset)
        first = offset - self.start
        last = len(self)
        if last - first > about:
            begin = max(first - len(self.mark) + 1, 0)  # a reader may begin within a mark
            last = self._bytes.rfind(self.mark, begin, first + about)
            if last < 0:
                last = self._bytes.find(self.mark, first + about - len(self.mark) + 1)
            last += len(self.mark)
        return bytes(self._bytes[first:last])


# -- events


class Framing:
    """Splits a body into server-sent events, or into lines. `mark` is the terminator.

    Each server-sent event gets the offset of its end as its id. A browser's `EventSource` sends the
    last id back as ``Last-Event-ID``, which is therefore an offset. `n_events` counts the events
    with data.
    """

    def __init__(self, content_type: str = "text/event-stream") -> None:
        self._has_ids = content_type == "text/event-stream"
        self.mark = b"\n\n" if self._has_ids else b"\n"
        self.n_events = 0
        self._rest = b""  # the beginning of an event

    def feed(self, part: bytes, offset: int) -> bytes:
        """Add a part of the body. Returns the events that end in it; the first is at `offset`."""
        part = self._rest + part
        if part.endswith(self.mark) and part.count(self.mark) == 1:  # as nearly all do
            self._rest = b""
            return self.write(part, offset)
        *events, self._rest = part.split(self.mark)
        written = bytearray()
        for event in events:
            written += self.write(event + self.mark, offset + len(written))
        return bytes(written)

    def write(self, event: bytes, offset: int) -> bytes:
        """Add an id to an event that begins at an offset. Comments get none."""
        if self._has_ids and event.startswith(b":"):
            return event
        self.n_events += 1
        if not self._has_ids:
            return event
        end = offset + len(event) + len(b"id: \n")
        n_digits = len(str(end))
        if len(str(end + n_digits)) > n_digits:  # the digits of the id are counted in it
            n_digits += 1
        return b"id: %d\n%b" % (end + n_digits, event)


# -- sessions


#: The header of a POST that names its stream.
ID = "X-Conversation-Id"

#: The headers of a POST that may ask for a session.
ASKED_BY = (ID.lower(), "prefer")

#: Bytes that a forgotten session keeps for its readers.
_REST = 2**16

#: Answers the request of a session, to a caller that stays to the end.
Ask: TypeAlias = Callable[[Caller], Awaitable[Reply]]


#: Called with a session and the change in the number of its bytes.
OnChange: TypeAlias = "Callable[[StreamSession, int], None]"


class StreamSession:
    """One stream. Made by `Sessions.start`.

    `conversation` is the client's name for it, and `secret` one that cannot be guessed; either may
    be empty. `on_change` is called with the change in the number of bytes kept.
    """

    def __init__(
        self,
        key: str,
        conversation: str,
        secret: str,
        route: Route,
        max_bytes: int,
        on_change: OnChange,
    ) -> None:
        self.key, self.conversation, self.secret = key, conversation, secret
        #: The client whose share of the limits it takes: its API key, or its address.
        self.client = key or current_client()
        self.path, self.content_type = route.path, route.streams
        #: Unix times; the second is 0 while the stream runs.
        self.started_at = int(time.time())
        self.completed_at = 0
        self.n_readers = 0
        self.is_stream = False  # the reply is a stream of the requested type, and has begun
        self.reply: Reply | None = None  # once it has begun
        self.failure: Exception | None = None  # why the stream is incomplete or missing
        self.problem: Mapping[str, Any] | None = None  # the same, as a reply that is no stream
        self._body_of = errors.bodies_on(route.path)
        self._shape = errors.shape_of(route.path)
        self._framing = Framing(route.streams)
        self.ring = Ring(max_bytes, self._framing.mark)
        self._whole = False  # the answer is complete
        self._changed_at = 0.0  # when events were added last
        self._on_change = on_change
        self._scope = trio.CancelScope()
        #: Set when the stream has begun, or the request has ended without one.
        self.answered = trio.Event()
        self._readers = trio.lowlevel.ParkingLot()

    # -- as its request sees it

    async def run(self, caller: Caller, ask: Ask) -> None:
        """Answer the request, and keep the stream, until it ends or `stop` is called."""
        structlog.contextvars.bind_contextvars(request_id=caller.request_id)
        try:
            with self._scope, caller.held:
                async with caller.resources:
                    await self._keep(await ask(caller))
        except* Exception as group:
            self.failure = errors.known(raised_alone(group))
        finally:
            self._finish()
            self._tell(caller)

    def _tell(self, caller: Caller) -> None:
        """Log the request, in place of the one that began it."""
        reply, ended = self.reply, caller.tally
        if isinstance(reply, Ending) and reply.failure is not None:
            ended.error = reply.failure
        elif self.failure is not None and ended.finish is None:
            ended.error = self.failure
        status = getattr(ended.error, "status", 500) if reply is None else reply.status
        request_log.tell(caller, status, stream="resumable")

    async def _keep(self, reply: Reply) -> None:
        """Keep a stream. It never waits for a reader."""
        self.reply = reply
        kind = reply.content_type.partition(";")[0]
        self.is_stream = reply.status == 200 and kind == self.content_type
        if not self.is_stream:
            make, _ = await value_of(reply)
            self.problem = make() if reply.status >= 400 else None
            self.failure = NotSupportedError("The answer is not a stream.")
            return
        self.answered.set()
        pieces = cast(AsyncGenerator[bytes, None], await reply.write())
        silence = () if reply.keep_alive is None else (partial(self._fill, reply.keep_alive),)
        self._changed_at = trio.current_time()
        async with alongside(*silence), aclosing(pieces):
            async for piece in pieces:
                self._append(self._framing.feed(piece, self.ring.end))
        self._whole = True

    async def _fill(self, silence: KeepAlive) -> None:
        """Keep a comment after each `interval` without an event. Runs until cancelled."""
        while True:
            before = self._changed_at
            await trio.sleep_until(before + silence.interval)
            if before == self._changed_at:
                comment = await silence.comment()
                if before == self._changed_at:
                    self._append(comment and self._framing.write(comment, self.ring.end))

    def _append(self, events: bytes) -> None:
        self._changed_at = trio.current_time()
        if not events:
            return
        before = len(self.ring)
        self.ring.append(events)
        self._on_change(self, len(self.ring) - before)
        self._readers.unpark_all()

    def _finish(self) -> None:
        if self._whole:
            self.failure = None  # stopped after the last event
        elif self.failure is None:
            self.failure = ServerClosingError("The server ended before the stream did.")
        if self.failure is not None:
            event = self.event_of(self.failure)
            self._append(self._framing.write(event, self.ring.end))
        self.ring.closed = True
        self.completed_at = int(time.time())
        self.answered.set()
        self._readers.unpark_all()

    # -- as its readers see it

    async def wait_change(self) -> None:
        """Wait until the stream has new events or has ended."""
        await self._readers.park()

    def event_of(self, error: Exception) -> bytes:
        """Encode an error as the last event for a reader."""
        return self._shape.event(self.problem or self._body_of(error), self._framing.n_events)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a reader for the duration of the block."""
        self.n_readers += 1
        try:
            yield
        finally:
            self.n_readers -= 1

    # -- as its owner sees it

    def stop(self, error: Exception) -> None:
        """Cancel the request, if it is running. Readers get the error as the last event."""
        if not self.ring.closed and self.failure is None:
            self.failure = error
            self._scope.cancel()

    def drop(self, n_bytes: int) -> None:
        """Discard the oldest events: at least `n_bytes` bytes, and whole events only."""
        before = len(self.ring)
        self.ring.drop(n_bytes)
        self._on_change(self, len(self.ring) - before)

    def release(self) -> None:
        """Stop counting the bytes of a forgotten session. Keep only the last for its readers."""
        self.drop(len(self.ring) - _REST)
        self._on_change(self, -len(self.ring))
        self._on_change = lambda session, n_bytes: None


# -- all sessions of an app


#: Seconds before a client may retry when too many streams are running.
_RETRY_AFTER = 10.0

#: Over the total limit, discard 1/8 of the largest stream: this makes room for a while.
_SHARE_TO_DROP = 8


class Sessions:
    """The sessions of an app. They begin only while `run` is running.

    Of several API keys, one has half of the sessions at most. Where the limits make it forget
    something, it is of the client that has most: so no client loses what it needs to another one
    that has more.
    """

    def __init__(self) -> None:
        self.n_bytes = 0  # kept by all sessions
        #: The beginning of names that cannot be guessed: who has the stream, if others may not.
        self.owner = ""
        self._bytes_of: Counter[str] = Counter()  # by client
        self.n_evicted = 0  # sessions forgotten early to make room
        self._config: Config
        self._jobs = Jobs()
        self._by_conversation: dict[tuple[str, str], StreamSession] = {}
        self._by_secret: dict[str, StreamSession] = {}
        self._running: dict[StreamSession, None] = {}  # oldest first
        self._finished: dict[StreamSession, float] = {}  # when each expires, earliest first
        self._has_finished = Bell()

    async def run(self, config: Config) -> None:
        """Run sessions until cancelled, which also cancels the sessions still running."""
        self._config = config
        async with alongside(partial(repeat, self._expire_next)):
            await self._jobs.run()

    def check_open(self) -> None:
        """Check that `run` runs. Raises ModelLoadingError before, and ServerClosingError after."""
        self._jobs.gate.check()
        if not self._jobs.have_begun:
            raise ModelLoadingError

    def __iter__(self) -> Iterator[StreamSession]:
        yield from self._running
        yield from self._finished

    # -- the life of a session

    def start(
        self,
        caller: Caller,
        conversation: str,
        route: Route,
        ask: Ask,
        *,
        secret: bool = False,
    ) -> StreamSession:
        """Start a stream of the answer to `ask`. It replaces a stream with the same name.

        With `secret`, it also gets a name that cannot be guessed.

        Raises:
            QueueFullError: too many streams are running.
            UnavailableError: as `check_open`.
        """
        self.check_open()
        key = caller.api_key
        if (old := self.find(key, conversation)) is not None:
            self.stop(old, "A newer request has the same conversation id.")
        self._make_room_for_one(key)
        hidden = self.owner + secrets.token_urlsafe(24) if secret else ""
        max_bytes = self._config.stream_bytes
        session = StreamSession(key, conversation, hidden, route, max_bytes, self._count)
        self._running[session] = None
        if conversation:
            self._by_conversation[key, conversation] = session
        if hidden:
            self._by_secret[hidden] = session
        other, caller.is_told = caller.another(without=ASKED_BY), True
        caller.limits_left = lambda: other.limits_left()
        self._jobs.begin(partial(self._live, session, other, ask))
        return session

    async def _live(self, session: StreamSession, caller: Caller, ask: Ask) -> None:
        set_client(session.client)
        try:
            await session.run(caller, ask)
        finally:
            if session in self._running:  # not forgotten meanwhile
                del self._running[session]
                self._finished[session] = trio.current_time() + self._config.stream_keep_seconds
                self._has_finished.ring()

    def stop(self, session: StreamSession, why: str) -> None:
        """Stop a stream and forget it. Its readers get `why` as an error."""
        session.stop(StreamStoppedError(why))
        self.forget(session)

    def forget(self, session: StreamSession) -> None:
        """Remove a stream from the index. It continues if it is running."""
        self._running.pop(session, None)
        self._finished.pop(session, None)
        self._by_secret.pop(session.secret, None)
        if self.find(session.key, session.conversation) is session:
            del self._by_conversation[session.key, session.conversation]
        session.release()

    # -- names

    def find(self, key: str, conversation: str) -> StreamSession | None:
        """Find a stream by the client's name for it."""
        return self._by_conversation.get((key, conversation))

    def find_secret(self, secret: str) -> StreamSession | None:
        """Find a stream by the name that cannot be guessed."""
        return self._by_secret.get(secret)

    def lookup(self, key: str, conversations: Iterable[str]) -> list[StreamSession]:
        """Find the streams with these names, each alone or followed by ``::`` and a model.

        Each is found once, whatever names are given.
        """
        found: dict[str, list[StreamSession]] = {}
        for (owner, name), session in self._by_conversation.items():
            if owner == key:
                for short in _prefixes(name):
                    found.setdefault(short, []).append(session)
        streams = [session for name in conversations for session in found.get(name, ())]
        return list(dict.fromkeys(streams))

    # -- bounds

    def _make_room_for_one(self, key: str) -> None:
        client, most = key or current_client(), self._config.stream_sessions
        most_of_key = max(most // 2, 1) if self._config.has_several_keys else most
        everyone = set(self)
        own = {session for session in everyone if session.client == client}
        if key and len(own) >= most_of_key:
            self._evict_one_of(own, f"{len(own)} streams of this API key run, which is the most.")
        elif len(everyone) >= most:
            n_of = Counter(session.client for session in everyone)
            able = {session for session in everyone if n_of[session.client] >= len(own)}
            self._evict_one_of(able, f"{len(everyone)} streams run, which is the most.", n_of)

    def _evict_one_of(
        self, sessions: Set[StreamSession], otherwise: str, n_of: Mapping[str, int] | None = None
    ) -> None:
        """Evict the session that ended first, of the client that has most by `n_of`.

        Raises:
            QueueFullError: none has ended.
        """
        ended = [each for each in self._finished if each in sessions]
        if not ended:
            raise QueueFullError(otherwise, retry_after=_RETRY_AFTER)
        self._evict(max(ended, key=lambda each: n_of[each.client] if n_of else 0))

    def _evict(self, session: StreamSession) -> None:
        self.forget(session)
        self.n_evicted += 1

    def _count(self, session: StreamSession, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        self._bytes_of[session.client] += n_bytes
        if not self._bytes_of[session.client]:
            del self._bytes_of[session.client]
        if n_bytes <= 0:
            return
        while (excess := self.n_bytes - self._config.stream_total_bytes) > 0:
            self._make_room_of(max(self._bytes_of, key=self._bytes_of.__getitem__), excess)

    def _make_room_of(self, client: str, n_bytes: int) -> None:
        """Forget what a client needs least: a stream that has ended, or the oldest events."""
        ended = (each for each in self._finished if each.client == client and len(each.ring))
        if (first := next(ended, None)) is not None:
            self._evict(first)
            return
        largest = max((each for each in self._running if each.client == client), key=_size)
        largest.drop(max(n_bytes, _size(largest) // _SHARE_TO_DROP))

    async def _expire_next(self) -> None:
        """Forget an ended stream after `keep_seconds`, unless it has readers."""
        while not self._finished:
            self._has_finished = Bell()
            await self._has_finished.wait()
        session, until = next(iter(self._finished.items()))
        if until > trio.current_time():
            await trio.sleep(until - trio.current_time())
        elif session.n_readers:
            del self._finished[session]
            self._finished[session] = trio.current_time() + self._config.stream_keep_seconds
        else:
            self.forget(session)


def _size(session: StreamSession) -> int:
    return len(session.ring)


def _prefixes(name: str) -> Iterator[str]:
    """Yield a name, and the part before each ``::`` in it."""
    yield name
    at = name.find("::")
    while at >= 0:
        yield name[:at]
        at = name.find("::", at + 1)
