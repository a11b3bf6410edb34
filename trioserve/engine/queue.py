"""The tasks that wait for a slot, and whose turn it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from time import monotonic
from typing import Generic, TypeVar

import attrs

from trioserve.types import AnyTask, Task, WaitingStatus

#: After waiting for this many seconds, a task counts as one priority higher.
AGEING_S = 10.0


@attrs.define(eq=False)
class QueuedRequest:
    """A task in an engine: whose turn it is, and since when."""

    task: AnyTask
    submitted_at: float = attrs.field(init=False, factory=lambda: monotonic())
    admitted_at: float | None = attrs.field(init=False, default=None)
    #: It has had its turn, and lost its slot for want of cells.
    is_preempted: bool = attrs.field(init=False, default=False)
    #: The step in which it first had its turn and found too few cells; 0: it has not.
    short_since: int = attrs.field(init=False, default=0)

    @property
    def queue_ms(self) -> float:
        """Milliseconds until it was admitted, or until now."""
        return ((self.admitted_at or monotonic()) - self.submitted_at) * 1e3

    def risen_priority(self, now: float) -> int:
        """Its priority after waiting and running until `now` (monotonic)."""
        return self.task.priority + int((now - self.submitted_at) / AGEING_S)


def waiting_status(requests: Iterable[QueuedRequest]) -> tuple[WaitingStatus, ...]:
    """Describe requests that wait, in the order of their turns."""
    now = monotonic()
    return tuple(
        WaitingStatus(
            task_id=request.task.id,
            position=position,
            n_prompt=len(request.task.prompt),
            priority=request.task.priority,
            waited_s=now - request.submitted_at,
            adapters=request.task.root.adapters if isinstance(request.task, Task) else (),
        )
        for position, request in enumerate(requests, start=1)
    )


_Request = TypeVar("_Request", bound=QueuedRequest)


class WaitingQueue(Generic[_Request]):
    """Orders tasks by priority, then fairly between clients, then by arrival.

    Fair means start-time fair queueing: the clock of a client advances by ``1 / weight`` with
    each task, and the client that is furthest behind goes first. So clients take turns, however
    many tasks one of them has sent, and a weight of 2 gets two turns.

    A waiting task rises in priority, up to the highest one in the queue: low priorities do not
    starve, and equal ones stay equal. A request that was preempted for lack of cells has had its
    turn: it has the next one of its client, at no cost. One that lost its slot because its reader
    stalled waits for another turn.
    """

    def __init__(self, now: Callable[[], float] = monotonic) -> None:
        self._now = now
        self._runs: dict[int, _Request] = {}  # by task id, in order of arrival
        self._tags: dict[int, float] = {}  # by task id: when it starts, by its client's clock
        self._clocks: dict[str, float] = {}  # by client: the end of its last task
        self._clock = 0.0  # the start of the task that was admitted last

    def __len__(self) -> int:
        return len(self._runs)

    def __iter__(self) -> Iterator[_Request]:
        """Go through the requests in the order of their turns."""
        if not self._runs:
            return iter(())
        now, tags = self._now(), self._tags
        top = max(request.task.priority for request in self._runs.values())

        def turn(request: _Request) -> tuple[int, float, bool, int]:
            risen, id_ = min(request.risen_priority(now), top), request.task.id
            return (-risen, tags[id_], not request.is_preempted, id_)

        return iter(sorted(self._runs.values(), key=turn))

    def get(self, task_id: int) -> _Request | None:
        return self._runs.get(task_id)

    def push(self, request: _Request) -> None:
        """Add a request: a new one, or one that had a slot."""
        task = request.task
        start = max(self._clock, self._clocks.get(task.client, 0.0))
        if request.is_preempted:
            others = (one.task for one in self._runs.values() if one.task.client == task.client)
            start = min((self._tags[other.id] for other in others), default=start)
        else:
            self._clocks[task.client] = start + 1 / task.weight
        self._runs[task.id], self._tags[task.id] = request, start

    def admit(self, request: _Request) -> None:
        """Take out the request whose turn it is."""
        self._clock = max(self._clock, self._tags[request.task.id])
        self.remove(request.task.id)
        if not self._runs:
            self._clocks.clear()  # no client is behind another

    def remove(self, task_id: int) -> _Request | None:
        self._tags.pop(task_id, None)
        return self._runs.pop(task_id, None)
