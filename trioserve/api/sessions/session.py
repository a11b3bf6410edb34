"""`Session`: one stream of events, from when it is asked for until it is forgotten.

It is written by the request that runs in it, as an ASGI ``send``, and read by any number of others,
which come and go.
"""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import attrs
import trio

from trioserve.api.sessions.framing import framing_of
from trioserve.api.sessions.ring import Ring
from trioserve.errors import NotSupportedError, ServerClosingError

#: Bytes that the readers of a session may still get when it has been forgotten.
_REST = 2**16

Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

#: An ASGI ``send``.
Send: TypeAlias = Callable[[Any], Awaitable[None]]


@attrs.frozen
class Form:
    """How an API writes its streams, and what goes wrong in them."""

    content_type: str
    body: Callable[[Exception], Mapping[str, Any]]  # of an error
    event: Callable[[Mapping[str, Any], int], bytes]  # of such a body, after so many events


@attrs.frozen
class Head:
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


class Session:
    """One stream. Made by `Sessions.start`.

    Args:
        names: under which it is found.
        form: how its API writes.
        max_bytes: how many bytes are kept.
        on_change: is told by how many bytes there are more, or fewer.
    """

    def __init__(
        self, names: Names, form: Form, max_bytes: int, on_change: Callable[[int], None]
    ) -> None:
        self.names = names
        self.form = form
        #: Unix times; the second is 0 while the stream runs.
        self.started_at = int(time.time())
        self.completed_at = 0
        self.n_readers = 0
        self.head: Head | None = None
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
            self.head = Head(message["status"], tuple(message["headers"]))
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
