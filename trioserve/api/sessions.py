"""Streams that outlive the connections of their readers: their bytes, their ends, their bounds.

A `StreamSession` is written by the request that runs in it, as an ASGI ``send``, and read by any
number of others, which come and go. `Sessions` finds them, and keeps them within bounds: over a
bound, the session that ended first goes first. While too many run, there are no new ones.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import attrs
import trio

from trioserve.config import Config
from trioserve.errors import (
    InvalidRequestError,
    NotSupportedError,
    QueueFullError,
    ServerClosingError,
    StreamStoppedError,
)

# -- bytes


class OffsetError(InvalidRequestError):
    """A reader of a stream asks for bytes that are no longer kept, or not there yet."""


class Ring:
    """Keeps whole events, up to a number of bytes; then the oldest events make room for new ones.

    Offsets count the bytes since the stream began. What is kept begins at `start`, which is where
    an event begins, and ends at `end`.

    Args:
        max_bytes: how many bytes are kept.
        mark: what each event ends with, and what occurs nowhere else.
    """

    def __init__(self, max_bytes: int, mark: bytes) -> None:
        self.start = 0
        self.closed = False
        self.mark = mark
        self._max_bytes = max_bytes
        self._bytes = bytearray()

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def end(self) -> int:
        """How many bytes the stream has had so far."""
        return self.start + len(self._bytes)

    def append(self, events: bytes) -> None:
        """Add whole events. One that is larger than the ring is not kept."""
        assert not self.closed and events.endswith(self.mark)
        self._bytes += events
        if len(self._bytes) > self._max_bytes:
            self.drop(len(self._bytes) - self._max_bytes)

    def drop(self, n_bytes: int) -> None:
        """Forget the oldest events, of at least so many bytes."""
        if n_bytes > 0:
            found = self._bytes.find(self.mark, max(n_bytes - len(self.mark), 0))
            n_bytes = len(self) if found < 0 else found + len(self.mark)
            del self._bytes[:n_bytes]
            self.start += n_bytes

    def close(self) -> None:
        """There will be no more events."""
        self.closed = True

    def check(self, offset: int, param: str | None = None) -> None:
        """Look whether a reader can begin at an offset; `param` says where it gave that.

        Raises:
            OffsetError: what is there is no longer kept, or the stream has not come so far.
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
        """Whether an event begins at an offset that is there, or will begin."""
        before = offset - self.start
        begin = max(before - len(self.mark), 0)
        return before == 0 or self._bytes[begin:before] == self.mark

    def read(self, offset: int, about: int) -> bytes:
        """Give what there is from an offset on: up to `about` bytes, or else a single event.

        It ends where an event ends. Empty: there is no more, so far. Raises as `check`.
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
    """Cuts a body into events: server-sent ones, or else lines. `mark` is what each ends with.

    Each server-sent event gets the offset of its end as its id. A browser's `EventSource` sends the
    last id back as ``Last-Event-ID``, which so is an offset. `n_events` counts those with data.
    """

    def __init__(self, content_type: str = "text/event-stream") -> None:
        self._has_ids = content_type == "text/event-stream"
        self.mark = b"\n\n" if self._has_ids else b"\n"
        self.n_events = 0
        self._rest = b""  # the beginning of an event

    def feed(self, part: bytes, offset: int) -> bytes:
        """Take a part of the body; gives the events that end in it, the first at an offset."""
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
        """Write an event that begins at an offset. Comments have no id."""
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


#: Bytes that the readers of a session may still get when it has been forgotten.
_REST = 2**16

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

#: An ASGI ``send``.
Send: TypeAlias = Callable[[Any], Awaitable[None]]


@attrs.frozen
class StreamFormat:
    """How an API writes its streams, and what goes wrong in them."""

    content_type: str
    body: Callable[[Exception], Mapping[str, Any]]  # of an error
    event: Callable[[Mapping[str, Any], int], bytes]  # of such a body, after so many events


@attrs.frozen
class AnswerHead:
    """The status and the headers of an answer."""

    status: int
    headers: Headers

    def is_stream(self, content_type: str) -> bool:
        """Whether the body is a stream of this type."""
        given = dict(self.headers).get(b"content-type", b"").decode("latin-1")
        return self.status == 200 and given.partition(";")[0] == content_type


@attrs.frozen
class Names:
    """Under which names a session is found: a client's own, within its API key, and a secret."""

    key: str
    conversation: str | None = None
    secret: str | None = None


class StreamSession:
    """One stream. Made by `Sessions.start`.

    Args:
        names: under which it is found.
        form: how its API writes.
        max_bytes: how many bytes are kept.
        on_change: is told by how many bytes there are more, or fewer.
    """

    def __init__(
        self, names: Names, form: StreamFormat, max_bytes: int, on_change: Callable[[int], None]
    ) -> None:
        self.names = names
        self.form = form
        #: Unix times; the second is 0 while the stream runs.
        self.started_at = int(time.time())
        self.completed_at = 0
        self.n_readers = 0
        self.head: AnswerHead | None = None
        self.is_stream = False  # the answer is the stream that was asked for, and has begun
        self.body = b""  # of an answer that is no stream
        self.failure: Exception | None = None  # why there is no whole answer
        self._framing = Framing(form.content_type)
        self.ring = Ring(max_bytes, self._framing.mark)
        self._whole = False  # the answer came to its end
        self._on_change = on_change
        self._scope = trio.CancelScope()
        self._answered = trio.Event()
        self._readers = trio.lowlevel.ParkingLot()

    # -- as its request sees it

    async def run(self, ask: Callable[[Send], Awaitable[None]]) -> None:
        """Run the request that writes the stream, until it has ended or `stop` is called."""
        try:
            with self._scope:
                await ask(self.take)
        except Exception as error:
            self.failure = error
        finally:
            self._finish()

    async def take(self, message: Mapping[str, Any]) -> None:
        """Take a message of the answer. This is an ASGI ``send`` that never waits for a reader."""
        if message["type"] == "http.response.start":
            self.head = AnswerHead(message["status"], tuple(message["headers"]))
            self.is_stream = self.head.is_stream(self.form.content_type)
            if self.is_stream:
                self._answered.set()
            return
        if not self.is_stream:
            self.body += message.get("body", b"")
        elif events := self._framing.feed(message.get("body", b""), self.ring.end):
            self._append(events)
        self._whole = not message.get("more_body", False)

    def _append(self, events: bytes) -> None:
        before = len(self.ring)
        self.ring.append(events)
        self._on_change(len(self.ring) - before)
        self._readers.unpark_all()

    def _finish(self) -> None:
        if self._whole:
            self.failure = None  # it was stopped too late
        elif self.failure is None:
            self.failure = ServerClosingError("The server ended before the stream did.")
        if not (self._whole and self.is_stream):
            event = self.form.event(self._what_went_wrong(), self._framing.n_events)
            self._append(self._framing.write(event, self.ring.end))
        self.ring.close()
        self.completed_at = int(time.time())
        self._answered.set()
        self._readers.unpark_all()

    def _what_went_wrong(self) -> Mapping[str, Any]:
        """The body of an error that says why there is no stream, or no whole one."""
        if self.failure is None and self.head is not None and self.head.status >= 400:
            with suppress(ValueError):
                body: Mapping[str, Any] = json.loads(self.body)
                return body
        return self.form.body(self.failure or NotSupportedError("The answer is not a stream."))

    # -- as its readers see it

    @property
    def is_answered(self) -> bool:
        """Whether the stream has begun, or there will be none."""
        return self._answered.is_set()

    async def wait_answer(self) -> None:
        """Wait until the stream has begun, or there will be none."""
        await self._answered.wait()

    async def wait_change(self) -> None:
        """Wait until there are more events, or the stream has ended."""
        await self._readers.park()

    def event_of(self, error: Exception) -> bytes:
        """Write an error as the last event that a reader gets."""
        return self.form.event(self.form.body(error), self._framing.n_events)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a reader for as long as the block lasts."""
        self.n_readers += 1
        try:
            yield
        finally:
            self.n_readers -= 1

    # -- as its owner sees it

    def stop(self, error: Exception) -> None:
        """End the request, if it runs. The last event tells readers of the error."""
        if not self.ring.closed and self.failure is None:
            self.failure = error
            self._scope.cancel()

    def drop(self, n_bytes: int) -> None:
        """Forget the oldest events, of at least so many bytes."""
        before = len(self.ring)
        self.ring.drop(n_bytes)
        self._on_change(len(self.ring) - before)

    def release(self) -> None:
        """Count for nothing: nobody finds the session any more. Its readers get the rest of it."""
        self.drop(len(self.ring) - _REST)
        self._on_change(-len(self.ring))
        self._on_change = _nothing


def _nothing(n_bytes: int) -> None:
    """Ignore a change of what is not counted any more."""


# -- all sessions of an app


#: Seconds after which a client may try again that was refused because too many streams run.
_RETRY_AFTER = 10.0

#: Of the largest stream, when there are too many bytes in all: 1/8 makes room for a while.
_SHARE_TO_DROP = 8


@attrs.frozen
class StreamLimits:
    """The bounds of all sessions together, and how long one is kept after its end."""

    sessions: int
    sessions_of_key: int
    bytes_each: int
    bytes_in_all: int
    keep_seconds: float

    @classmethod
    def of(cls, config: Config) -> StreamLimits:
        """The bounds that a configuration sets. Of several API keys, one has half of the sessions
        at most.
        """
        n = config.stream_sessions
        return cls(
            sessions=n,
            sessions_of_key=n if len(config.api_keys) < 2 else max(n // 2, 1),
            bytes_each=config.stream_bytes,
            bytes_in_all=config.stream_total_bytes,
            keep_seconds=config.stream_keep_seconds,
        )


class Sessions:
    """The sessions of an app. There are some while `run` does."""

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self.n_bytes = 0  # that are kept, in all
        self.n_evicted = 0  # sessions that were forgotten early, to make room
        self._clock = clock
        self._limits: StreamLimits
        self._nursery: trio.Nursery | None = None
        self._by_conversation: dict[tuple[str, str], StreamSession] = {}
        self._by_secret: dict[str, StreamSession] = {}
        self._running: dict[StreamSession, None] = {}  # in the order in which they began
        self._finished: dict[
            StreamSession, float
        ] = {}  # until when each is kept; the next to go first
        self._has_finished = trio.Event()

    async def run(self, config: Config) -> None:
        """Keep sessions, until cancelled. Then those that still run are ended."""
        self._limits = StreamLimits.of(config)
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            try:
                await self._keep_expiring()
            finally:
                self._nursery = None

    @property
    def is_open(self) -> bool:
        """Whether there may be sessions: the server has begun, and has not ended."""
        return self._nursery is not None

    def __iter__(self) -> Iterator[StreamSession]:
        yield from self._running
        yield from self._finished

    # -- the life of a session

    def start(
        self,
        key: str,
        conversation: str | None,
        form: StreamFormat,
        ask: Callable[[Send], Awaitable[None]],
        *,
        secret: bool,
    ) -> StreamSession:
        """Begin a stream, in place of one that has the same name.

        Args:
            key: the API key that wants it.
            conversation: what the client calls it.
            form: how its API writes.
            ask: runs the request that writes the stream.
            secret: whether it has a name that cannot be guessed, too.

        Raises:
            QueueFullError: too many run.
            ServerClosingError: the server has ended.
        """
        if self._nursery is None:
            raise ServerClosingError
        if conversation is not None and (old := self.find(key, conversation)) is not None:
            self.stop(old, "A newer request has the same conversation id.")
        self._make_room_for_one(key)
        names = Names(key, conversation, secrets.token_urlsafe(24) if secret else None)
        session = StreamSession(names, form, self._limits.bytes_each, self._count)
        self._running[session] = None
        if names.conversation is not None:
            self._by_conversation[key, names.conversation] = session
        if names.secret is not None:
            self._by_secret[names.secret] = session
        self._nursery.start_soon(self._live, session, ask)
        return session

    async def _live(self, session: StreamSession, ask: Callable[[Send], Awaitable[None]]) -> None:
        await session.run(ask)
        if session in self._running:  # nobody has stopped it
            del self._running[session]
            self._finished[session] = self._clock() + self._limits.keep_seconds
            self._has_finished.set()

    def stop(self, session: StreamSession, why: str) -> None:
        """End a stream, and forget it. Its readers are told why."""
        session.stop(StreamStoppedError(why))
        self.forget(session)

    def forget(self, session: StreamSession) -> None:
        """Find a stream no more. If it runs, it runs on."""
        names = session.names
        self._running.pop(session, None)
        self._finished.pop(session, None)
        if names.conversation is not None:
            named = (names.key, names.conversation)
            if self._by_conversation.get(named) is session:
                del self._by_conversation[named]
        if names.secret is not None:
            self._by_secret.pop(names.secret, None)
        session.release()

    # -- names

    def find(self, key: str, conversation: str) -> StreamSession | None:
        """Find a stream by what the client calls it."""
        return self._by_conversation.get((key, conversation))

    def find_secret(self, secret: str) -> StreamSession | None:
        """Find a stream by the name that cannot be guessed."""
        return self._by_secret.get(secret)

    def lookup(self, key: str, conversations: Iterable[str]) -> list[StreamSession]:
        """Find those that have these names, or one of them with ``::`` and a model behind it."""
        found: dict[str, list[StreamSession]] = {}
        for (owner, name), session in self._by_conversation.items():
            if owner == key:
                for short in _prefixes(name):
                    found.setdefault(short, []).append(session)
        return [session for name in conversations for session in found.get(name, ())]

    # -- bounds

    def _make_room_for_one(self, key: str) -> None:
        limits = self._limits
        everyone = set(self)
        own = {session for session in everyone if session.names.key == key}
        if len(own) >= limits.sessions_of_key:
            self._evict_one_of(own, f"{len(own)} streams of this API key run, which is the most.")
        elif len(everyone) >= limits.sessions:
            self._evict_one_of(everyone, f"{len(everyone)} streams run, which is the most.")

    def _evict_one_of(self, sessions: Set[StreamSession], otherwise: str) -> None:
        """Forget the one that ended first. Raises QueueFullError: none has ended."""
        first = next((each for each in self._finished if each in sessions), None)
        if first is None:
            raise QueueFullError(otherwise, retry_after=_RETRY_AFTER)
        self._evict(first)

    def _evict(self, session: StreamSession) -> None:
        self.forget(session)
        self.n_evicted += 1

    def _count(self, n_bytes: int) -> None:
        self.n_bytes += n_bytes
        if n_bytes <= 0:
            return
        while (excess := self.n_bytes - self._limits.bytes_in_all) > 0:
            if self._finished:
                self._evict(next(iter(self._finished)))
            else:
                largest = max(self._running, key=_size)
                largest.drop(max(excess, _size(largest) // _SHARE_TO_DROP))

    async def _keep_expiring(self) -> None:
        """Forget streams some time after their end, unless somebody reads them. Never returns."""
        while True:
            while not self._finished:
                self._has_finished = trio.Event()
                await self._has_finished.wait()
            session, until = next(iter(self._finished.items()))
            if until > self._clock():
                await trio.sleep(until - self._clock())
            elif session.n_readers:
                del self._finished[session]
                self._finished[session] = self._clock() + self._limits.keep_seconds
            else:
                self.forget(session)


def _size(session: StreamSession) -> int:
    return len(session.ring)


def _prefixes(name: str) -> Iterator[str]:
    """A name, and what is before each ``::`` in it."""
    yield name
    at = name.find("::")
    while at >= 0:
        yield name[:at]
        at = name.find("::", at + 1)
