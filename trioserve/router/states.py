"""The state of a fleet's models, and the events about it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from typing import Any

import attrs

from trioserve.concurrency import Feed
from trioserve.errors import ModelFailedError


class Status(StrEnum):
    """The status of a model, in the words of llama-server."""

    UNLOADED = "unloaded"
    DOWNLOADING = "downloading"
    LOADING = "loading"
    LOADED = "loaded"
    SLEEPING = "sleeping"


@attrs.frozen(kw_only=True)
class ModelState:
    """A model as it is now."""

    value: Status = Status.UNLOADED
    #: The flags of its process; empty without a process.
    args: tuple[str, ...] = ()
    pid: int | None = None
    #: The share that is loaded, 0.0 to 1.0, while it loads.
    progress: float | None = None
    #: True if its last process ended unexpectedly, and the details.
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
    #: Bytes of RAM that its process has, and of each device; only known where they are measured.
    memory_used: int | None = None
    memory_gpus: tuple[int, ...] = ()


@attrs.frozen(kw_only=True)
class FleetEvent:
    """An event of a model, as ``/models/sse`` sends it. The model ``*`` means all."""

    model: str
    event: str
    data: Mapping[str, Any] | None = None


@attrs.frozen(kw_only=True)
class QueueStatus:
    """The place of a request that waits for its model.

    `position` counts the waiting requests that are before it. `progress` is the share of the model
    that is loaded, once it is this model's turn.
    """

    position: int
    status: Status
    progress: float | None = None


#: Events that a subscriber may leave unread, before it is cut off.
MAX_UNREAD = 1000


class Events:
    """Hands events on to subscribers. None of them can hold up the others."""

    def __init__(self) -> None:
        self._feeds: set[Feed[FleetEvent]] = set()

    @contextmanager
    def subscribe(self) -> Iterator[Feed[FleetEvent]]:
        """Receive the events from now on. The feed ends for one who leaves too many unread."""
        feed = Feed[FleetEvent]()
        self._feeds.add(feed)
        try:
            yield feed
        finally:
            self._feeds.remove(feed)

    def tell(self, event: FleetEvent) -> None:
        """Send an event to all readers; one that is too slow gets none."""
        for feed in self._feeds:
            if len(feed) < MAX_UNREAD:
                feed.put(event)
            else:
                feed.end()


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
        self._reason = ""

    def note(self, now: float, reason: str) -> float | None:
        """Count a death. Returns the seconds until the next start; None: there were too many."""
        self._reason = reason
        self._times = [*(time for time in self._times if time > now - WINDOW), now]
        if len(self._times) < MAX_DEATHS:
            return _DELAYS[len(self._times) - 1]
        self._failed_until = now + WINDOW
        return None

    def error(self, name: str, now: float) -> ModelFailedError | None:
        """Why the model of this name is not started now; None: it may be started."""
        wait_s = self._failed_until - now
        if wait_s <= 0:
            return None
        return ModelFailedError(
            f"The model {name!r} has failed {MAX_DEATHS} times within a minute, so it is not "
            f"started again for another {wait_s:.0f} seconds. {self._reason}",
            retry_after=wait_s,
        )

    def forget(self) -> None:
        """Forget them, because a person asked for it or the model has changed."""
        self._times.clear()
        self._failed_until = 0.0
