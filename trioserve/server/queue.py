"""The queue as requests see it: who waits where."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import trio

from trioserve.types import EngineStatus, WaitingStatus

#: Seconds for which one look at the queue serves all who ask: streams may be many.
FRESH = 1.0


class Queue:
    """The queue as it was a moment ago.

    Args:
        look: looks at the engine.
    """

    def __init__(self, look: Callable[[], Awaitable[EngineStatus]]) -> None:
        self._look = look
        self._looking = trio.Lock()
        self._seen_at: float | None = None
        self._places: dict[int, WaitingStatus] = {}

    async def first_of(self, task_ids: Sequence[int]) -> WaitingStatus | None:
        """Find the place of that task which is next; None when none of them waits."""
        async with self._looking:
            if self._seen_at is None or trio.current_time() >= self._seen_at + FRESH:
                status = await self._look()
                self._places = {one.task_id: one for one in status.waiting}
                self._seen_at = trio.current_time()
        places = [self._places[id_] for id_ in task_ids if id_ in self._places]
        return min(places, key=lambda place: place.position, default=None)
