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
from trioserve.server.memory import Hold
from trioserve.server.stream import ChatStream, Stream

#: Seconds that a pending response waits for its reader.
PENDING_SECONDS = 60.0

#: Responses that may be pending at the same time, and ids that are remembered after the end.
MAX_PENDING = 256
MAX_ENDED = 1024

#: Starts a response within the request that comes to read it.
Start: TypeAlias = Callable[[], Awaitable[EventStream]]

#: What is said of the id of a completion that is not running here.
NOT_RUNNING = "no active completion for this id"


class ConflictError(TrioServeError):
    """The stream is being read by somebody else."""

    status = 409
    type = "invalid_request_error"


@attrs.define(eq=False)
class Pending:
    """A response that was asked for. `held` is what it takes of the memory for requests."""

    start: Start
    held: Hold
    deadline: float


@attrs.define(eq=False)
class Running:
    """A response that is being sent; its streams are known once it has been started."""

    streams: Sequence[Stream] | Sequence[ChatStream] = ()
    client: str | None = None  # who may find it; None: whoever knows its id
    reasoning_control: bool = False  # whether the request allows that its reasoning is ended
    pending: Pending | None = None  # what it was, if it was

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
        self._pending: OrderedDict[str, Pending] = OrderedDict()
        self._running: dict[str, Running] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()
        self._added = trio.Event()

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

    def add(self, start: Start, held: Hold) -> str:
        """Keep a response for its reader, and what its request holds; returns its id.

        Raises:
            QueueFullError: too many are pending; of one API key, half of them are too many.
        """
        self._expire()
        n_own = sum(one.held.owner == held.owner for one in self._pending.values())
        if len(self._pending) >= MAX_PENDING or (held.owner and n_own >= MAX_PENDING // 2):
            raise QueueFullError("Too many streams wait to be read.", retry_after=PENDING_SECONDS)
        id_ = secrets.token_urlsafe(24)
        self._pending[id_] = Pending(start, held.detach(), self._clock() + PENDING_SECONDS)
        self._added.set()
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
        pending = self._pending.pop(id_)
        self._running[id_] = Running(pending=pending)
        return pending.start

    def started(self, id_: str, streams: Sequence[Stream] | Sequence[ChatStream]) -> None:
        """Note what `cancel` has to end."""
        self._running[id_].streams = streams

    def put_back(self, id_: str) -> None:
        """Undo `take`: the response was not started, and may be tried again."""
        pending = self._running.pop(id_).pending
        assert pending is not None
        pending.deadline = self._clock() + PENDING_SECONDS
        self._pending[id_] = pending
        self._added.set()

    def end(self, id_: str) -> None:
        """Note that a response has ended, unless it was put back."""
        if id_ in self._pending:
            return
        running = self._running.pop(id_, None)
        if running is not None and running.pending is not None:
            running.pending.held.release()
        self._ended[id_] = None
        while len(self._ended) > MAX_ENDED:
            self._ended.popitem(last=False)

    def cancel(self, id_: str) -> None:
        """Drop a pending response, or end a running one. One that has ended stays so.

        Raises:
            NotFoundError: the id is unknown.
        """
        self._expire()
        if (pending := self._pending.pop(id_, None)) is not None:
            pending.held.release()
            self.end(id_)
        elif self._is_running(id_):
            self._running[id_].cancel()
        elif id_ not in self._ended:
            raise NotFoundError("There is no such stream.")

    async def keep_expiring(self) -> None:
        """Let go of responses that nobody came for, until cancelled."""
        while True:
            while not self._pending:
                self._added = trio.Event()
                await self._added.wait()
            deadline = next(iter(self._pending.values())).deadline
            await trio.sleep(deadline - self._clock())
            self._expire()

    def _is_running(self, id_: str) -> bool:
        return id_ in self._running and self._running[id_].pending is not None

    def _expire(self) -> None:
        """Forget those that nobody came for. They stand in the order in which they came."""
        while self._pending:
            id_, pending = next(iter(self._pending.items()))
            if pending.deadline > self._clock():
                return
            del self._pending[id_]
            pending.held.release()
