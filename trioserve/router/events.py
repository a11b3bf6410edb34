"""What happens to models, for everybody who wants to know."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from trioserve.router.states import FleetEvent

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
