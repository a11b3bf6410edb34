"""`Responses`: the responses of an app that can be reached by id, on other connections too.

A response is *pending* from when it was asked for until somebody comes to read it, *running* while
it is sent, and *ended* afterwards. One that is sent at once on the connection that asked for it is
only ever running, under the id that its chunks show.
"""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeAlias

import attrs
import trio

from trioserve.api.base.sse import EventStream
from trioserve.errors import NotFoundError, QueueFullError, TrioServeError
from trioserve.server.stream import ChatStream, Stream

#: Seconds that a pending response waits for its reader.
PENDING_SECONDS = 60.0

#: Responses that may be pending at the same time, and ids that are remembered after the end.
MAX_PENDING = 256
MAX_ENDED = 1024

#: Starts a response within the request that comes to read it.
Start: TypeAlias = Callable[[], Awaitable[EventStream]]


class ConflictError(TrioServeError):
    """The stream is being read by somebody else."""

    status = 409
    type = "invalid_request_error"


@attrs.define(eq=False)
class Running:
    """A response that is being sent; its streams are known once it has been started."""

    streams: Sequence[Stream] | Sequence[ChatStream] = ()
    client: str | None = None  # who may find it; None: whoever knows its id
    reasoning_control: bool = False  # whether the request allows that its reasoning is ended
    was_pending: bool = False

    @property
    def live(self) -> list[Stream | ChatStream]:
        """The streams that have not ended."""
        return [stream for stream in self.streams if not stream.mailbox.ended]

    def cancel(self) -> None:
        """End the streams; their reader gets a `RequestEndedError`."""
        for stream in self.live:
            stream.cancel()


class Responses:
    """The responses of an app, by id. Ids of pending ones cannot be guessed: they are keys."""

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._pending: OrderedDict[str, tuple[Start, float]] = OrderedDict()
        self._running: dict[str, Running] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    @contextmanager
    def running(
        self, id_: str, streams: Sequence[ChatStream], client: str, *, reasoning_control: bool
    ) -> Iterator[None]:
        """Have a client find its response by the id in the chunks, as long as a block lasts."""
        self._running[id_] = Running(tuple(streams), client, reasoning_control)
        try:
            yield
        finally:
            del self._running[id_]

    def find(self, id_: str, client: str) -> Running | None:
        """Find a response that is being sent, unless it is another client's."""
        found = self._running.get(id_)
        return found if found is not None and found.client in (None, client) else None

    # -- responses that wait for their reader

    def add(self, start: Start) -> str:
        """Keep a response for its reader; returns its id.

        Raises:
            QueueFullError: too many are pending.
        """
        self._expire()
        if len(self._pending) >= MAX_PENDING:
            raise QueueFullError("Too many streams wait to be read.", retry_after=PENDING_SECONDS)
        id_ = secrets.token_urlsafe(24)
        self._pending[id_] = (start, self._clock() + PENDING_SECONDS)
        return id_

    def take(self, id_: str) -> Start | None:
        """Take a pending response to start it; None when it has ended.

        Raises:
            NotFoundError: the id is unknown or has expired.
            ConflictError: it runs.
        """
        self._expire()
        if id_ in self._ended:
            return None
        if self._is_running(id_):
            raise ConflictError("This stream is being read on another connection.")
        if id_ not in self._pending:
            raise NotFoundError("There is no such stream, or nobody came for it in time.")
        start, _ = self._pending.pop(id_)
        self._running[id_] = Running(was_pending=True)
        return start

    def started(self, id_: str, streams: Sequence[Stream] | Sequence[ChatStream]) -> None:
        """Note what `cancel` has to end."""
        self._running[id_].streams = streams

    def put_back(self, id_: str, start: Start) -> None:
        """Undo `take`: the response was not started, and may be tried again."""
        del self._running[id_]
        self._pending[id_] = (start, self._clock() + PENDING_SECONDS)

    def end(self, id_: str) -> None:
        """Note that a response has ended, unless it was put back."""
        if id_ in self._pending:
            return
        self._running.pop(id_, None)
        self._ended[id_] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def cancel(self, id_: str) -> None:
        """Drop a pending response, or end a running one. One that has ended stays so.

        Raises:
            NotFoundError: the id is unknown.
        """
        self._expire()
        if self._pending.pop(id_, None) is not None:
            self.end(id_)
        elif self._is_running(id_):
            self._running[id_].cancel()
        elif id_ not in self._ended:
            raise NotFoundError("There is no such stream.")

    def _is_running(self, id_: str) -> bool:
        return id_ in self._running and self._running[id_].was_pending

    def _expire(self) -> None:
        """Forget those that nobody came for. They stand in the order in which they came."""
        while self._pending:
            id_, (_, deadline) = next(iter(self._pending.items()))
            if deadline > self._clock():
                return
            del self._pending[id_]
