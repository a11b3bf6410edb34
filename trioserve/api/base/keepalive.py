"""What keeps a silent stream alive: comments, which tell a waiting request where it stands."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import trio

from trioserve.server.dispatch import Mailbox
from trioserve.server.queue import Queue
from trioserve.types import WaitingStatus

#: A comment, which clients skip. It keeps proxies from closing a silent connection.
PING = b":\n\n"

#: Seconds that a look may take. The engine answers between two steps, and a ping should not wait.
LOOK_TIMEOUT = 1.0


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
