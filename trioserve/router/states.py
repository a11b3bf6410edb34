"""The state of a fleet's models, and the events about it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
import trio

from trioserve.errors import ModelFailedError
from trioserve.models.catalog import ModelEntry
from trioserve.router.child import Child


class Status(StrEnum):
    """What a model does, in the words of llama-server."""

    UNLOADED = "unloaded"
    DOWNLOADING = "downloading"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"


@attrs.frozen(kw_only=True)
class ModelState:
    """A model as it is now."""

    value: Status = Status.UNLOADED
    #: The flags of its process; none while there is no process.
    args: tuple[str, ...] = ()
    pid: int | None = None
    #: Where its process listens, once it does.
    socket_path: Path | None = None
    #: The share that is loaded, 0.0 to 1.0, while it loads.
    progress: float | None = None
    #: What its process said of the model when it was ready, in the form of ``/v1/models``.
    info: Mapping[str, Any] = attrs.field(factory=dict)
    #: Whether its last process ended unexpectedly, and the details.
    failed: bool = False
    exit_code: int | None = None
    message: str | None = None
    log_tail: tuple[str, ...] = ()
    #: When a request last began or ended, in seconds since the epoch.
    last_used: float | None = None
    n_requests: int = 0
    n_waiting: int = 0
    #: Bytes that it needs, by estimate; only known where there is a limit.
    memory: int | None = None


@attrs.frozen(kw_only=True)
class FleetEvent:
    """An event of a model, as ``/models/sse`` sends it. The model ``*`` means all."""

    model: str
    event: str
    data: Mapping[str, Any] | None = None


@attrs.frozen(kw_only=True)
class QueueStatus:
    """Where a request stands that waits for its model.

    `position` counts the waiting requests that are before it. `progress` is the share of the model
    that is loaded, once it is this model's turn.
    """

    position: int
    status: Status
    progress: float | None = None


#: Events that a subscriber may leave unread, before it is cut off.
_MAX_UNREAD = 1000


class Events:
    """Hands events on to subscribers. None of them can hold up the others."""

    def __init__(self) -> None:
        self._subscribers: set[trio.MemorySendChannel[FleetEvent]] = set()

    @asynccontextmanager
    async def subscribe(self) -> AsyncIterator[trio.MemoryReceiveChannel[FleetEvent]]:
        """Receive the events from now on. The channel ends for one who leaves too many unread."""
        send, receive = trio.open_memory_channel[FleetEvent](_MAX_UNREAD)
        self._subscribers.add(send)
        try:
            # Not `async with`, whose checkpoint would let `tell` meet a channel without a reader.
            with receive:
                yield receive
        finally:
            self._subscribers.discard(send)

    def tell(self, event: FleetEvent) -> None:
        """Hand an event on."""
        for one in list(self._subscribers):
            try:
                one.send_nowait(event)
            except (trio.WouldBlock, trio.BrokenResourceError):
                self._subscribers.discard(one)
                one.close()


#: This many deaths within these seconds are too many; for as long, it is not started again.
MAX_DEATHS = 3
WINDOW = 60.0

#: Seconds before the next start, after the first death within the window and the second.
_DELAYS = (0.25, 1.0)


class Deaths:
    """The recent deaths of one model's processes. Times are those of any clock, in seconds."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._failed_until = 0.0

    def note(self, now: float) -> float | None:
        """Count a death. Returns the seconds until the next start; None: there were too many."""
        self._times = [*(time for time in self._times if time > now - WINDOW), now]
        if len(self._times) < MAX_DEATHS:
            return _DELAYS[len(self._times) - 1]
        self._failed_until = now + WINDOW
        return None

    def wait_s(self, now: float) -> float:
        """Seconds until it may be started, when there were too many deaths; otherwise 0."""
        return max(0.0, self._failed_until - now)

    def forget(self) -> None:
        """Forget them, because a person asked for it or the model has changed."""
        self._times.clear()
        self._failed_until = 0.0


@attrs.define(eq=False)
class Record:
    """A model, its process if it has one, and how the last one ended."""

    entry: ModelEntry
    child: Child | None = None
    is_ready: bool = False  # its process was ready once, though it may sleep
    known: ModelState = attrs.field(factory=ModelState)  # but for what changes with each request
    last_used: float | None = None
    deaths: Deaths = attrs.field(factory=Deaths)

    def note(self, **changes: Any) -> None:
        """Change the state."""
        self.known = attrs.evolve(self.known, **changes)

    def begin(self, child: Child) -> None:
        """A process is being started."""
        self.child, self.is_ready = child, False
        args = (*self.entry.args, "--host", str(child.socket_path))
        self.known = ModelState(value=Status.LOADING, args=args, socket_path=child.socket_path)
        self.use()

    def end(self, child: Child) -> None:
        """Its process has ended."""
        self.child, self.is_ready = None, False
        self.note(
            value=Status.UNLOADED,
            socket_path=None,
            progress=None,
            exit_code=child.exit_code,
            failed=not child.asked,
        )
        if self.known.failed:
            self.note(message=child.last_words(), log_tail=tuple(child.lines))

    def use(self) -> None:
        """Note that it is in use now."""
        self.last_used = time.time()

    def too_often(self) -> ModelFailedError:
        """The error when its processes have died too often."""
        wait_s = self.deaths.wait_s(trio.current_time())
        return ModelFailedError(
            f"The model {self.entry.name!r} has failed {MAX_DEATHS} times within a minute, so it "
            f"is not started again for another {wait_s:.0f} seconds. {self.known.message}",
            retry_after=wait_s,
        )
