"""Where waiting requests stand: as comments in their streams, and as JSON."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import trio
from quart import current_app

from trioserve.api.base.service import current_server
from trioserve.server.dispatch import Mailbox
from trioserve.types import EngineStatus, WaitingStatus

#: A comment, which clients skip. It keeps proxies from closing a silent connection.
PING = b":\n\n"

#: Seconds for which one look at the queue serves all who ask: streams may be many.
FRESH = 1.0

#: Seconds that a look may take. The engine answers between two ticks, and a ping should not wait.
LOOK_TIMEOUT = 1.0

_NAME = "trioserve.queue"


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


def current_queue() -> Queue:
    """The queue of the app that handles the current request."""
    queue = current_app.extensions.get(_NAME)
    if queue is None:
        queue = current_app.extensions[_NAME] = Queue(current_server().status)
    assert isinstance(queue, Queue)
    return queue


class Waiting:
    """The wait of one response, whose streams have these mailboxes."""

    def __init__(self, queue: Queue, mailboxes: Sequence[Mailbox]) -> None:
        self._queue = queue
        self._mailboxes = mailboxes

    def is_queued(self) -> bool:
        """Whether none of the streams has a slot yet."""
        return all(mailbox.queued for mailbox in self._mailboxes)

    async def comment(self) -> bytes:
        """Write a comment for a silent stream: its place in the queue, or just a ping."""
        if self.is_queued():
            with trio.move_on_after(LOOK_TIMEOUT):
                place = await self._queue.first_of([each.task_id for each in self._mailboxes])
                if place is not None:
                    return comment_on(place)
        return PING


def comment_on(place: WaitingStatus) -> bytes:
    """Write a place as a comment, with the estimated wait where there is one."""
    about = "" if place.wait_s is None else f", about {place.wait_s:.1f} s"
    return f": queued, position {place.position}{about}\n\n".encode()


def place(one: WaitingStatus) -> dict[str, Any]:
    """Write a place as JSON. Whose task it is stays untold."""
    return {
        "id_task": one.task_id,
        "position": one.position,
        "n_prompt_tokens": one.n_prompt,
        "priority": one.priority,
        "waited_s": round(one.waited_s, 3),
        "wait_s": None if one.wait_s is None else round(one.wait_s, 3),
    }
