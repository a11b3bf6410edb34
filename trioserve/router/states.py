"""What a fleet tells of its models, and the events that it sends to all who subscribe."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from enum import StrEnum
from pathlib import Path
from typing import Any

import attrs
import trio


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
    #: Whether its last process ended without being asked to, and what is known of that.
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
    """Something happened to a model, as ``/models/sse`` tells it. The model ``*`` means all."""

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
