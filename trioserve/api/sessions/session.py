"""`Ring`: the newest bytes of a stream, which may be read from any offset that is still there."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import attrs
import trio

from trioserve.errors import InvalidRequestError, NotSupportedError, ServerClosingError

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
    """Cuts a body into events. `mark` is what each of them ends with.

    `n_events` counts those that have data.
    """

    mark = b"\n"

    def __init__(self) -> None:
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
        """Write an event that begins at an offset."""
        self.n_events += 1
        return event


class EventFraming(Framing):
    """Cuts server-sent events, and gives each the offset of its end as its id.

    A browser's `EventSource` sends the last id back as ``Last-Event-ID``, which so is an offset.
    """

    mark = b"\n\n"

    def write(self, event: bytes, offset: int) -> bytes:
        """Write an event that begins at an offset. Comments have no id."""
        if event.startswith(b":"):
            return event
        self.n_events += 1
        end = offset + len(event) + len(b"id: \n")
        n_digits = len(str(end))
        if len(str(end + n_digits)) > n_digits:  # the digits of the id are counted in it
            n_digits += 1
        return b"id: %d\n%b" % (end + n_digits, event)


def framing_of(content_type: str) -> Framing:
    """Make what cuts a body of this type: server-sent events, or else lines."""
    return EventFraming() if content_type == "text/event-stream" else Framing()


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
        self._framing = framing_of(form.content_type)
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
