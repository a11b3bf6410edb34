"""The common part of engines whose slots are alike: a request takes a free one, and keeps it."""

from __future__ import annotations

import abc
from collections import deque
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

import attrs

from trioserve.engine.backend import AnyBackend
from trioserve.engine.decoder import Threads
from trioserve.engine.loop import EngineLoop
from trioserve.engine.queue import QueuedRequest, WaitingQueue, waiting_status
from trioserve.errors import EngineError, TrioServeError
from trioserve.types import Admitted, EngineStatus, Failed, SlotStatus


@attrs.define(eq=False)
class SlottedRequest(QueuedRequest):
    """A task in the queue or in a slot."""

    slot: int = attrs.field(init=False, default=-1)


_Request = TypeVar("_Request", bound=SlottedRequest)


class SlottedEngine(EngineLoop, Generic[_Request]):
    """Lets requests in, in the order of the queue; a subclass runs the steps.

    A request keeps its slot until it ends: priorities order only the queue.

    Args:
        backend: the model. The engine owns it, and closes it when its thread ends.
        notify: see `EngineLoop`.
    """

    def __init__(self, backend: AnyBackend, notify: Callable[[], None]) -> None:
        super().__init__(backend, notify)
        self._owned = backend
        self._threads = Threads(backend, encoder=self.encoder)
        self._waiting: WaitingQueue[_Request] = WaitingQueue()
        #: Those that share the batches; the first one begins the next batch.
        self._running: deque[_Request] = deque()
        self._free_slots = list(reversed(range(backend.n_slots)))

    def _admit(self) -> None:
        for request in self._waiting:
            if not self._free_slots:
                return
            self._waiting.admit(request)
            request.admitted_at = self.heartbeat
            request.slot = self._free_slots.pop()
            self._running.append(request)
            self._emit(Admitted(request.task.id, request.queue_ms))

    def _drop(self, task_id: int) -> None:
        """Forget a task that was cancelled, queued or running."""
        self._waiting.remove(task_id)
        for request in [one for one in self._running if one.task.id == task_id]:
            self._remove(request)
        self._retract(task_id)

    def _remove(self, request: _Request) -> None:
        """Remove a request from its slot, and its cells from the context."""
        self._running.remove(request)
        self._free_slots.append(request.slot)

    def _fail(self, request: _Request, error: TrioServeError) -> None:
        self._remove(request)
        self._emit(Failed(request.task.id, error))

    def _rest(self) -> None:
        self._threads.rest()

    def _load(self) -> tuple[int, int]:
        return len(self._running), len(self._waiting)

    def _count_batch(self, requests: Iterable[_Request], n_decode: int, n_prefill: int) -> None:
        """Count a batch that was computed."""
        n_slots = len({request.slot for request in requests})
        self._in_batch = (n_slots, n_decode, n_prefill)
        counters = self._counters
        counters.decodes += 1
        counters.busy_slots += n_slots
        counters.prompt_tokens += n_prefill
        counters.prompt_queries = counters.prompt_tokens
        counters.predicted_tokens += n_decode

    def _fail_all(self, error: EngineError) -> None:
        for request in (*self._running, *self._waiting):
            self._emit(Failed(request.task.id, error))
            self._waiting.remove(request.task.id)
        self._running.clear()

    def _close(self) -> None:
        self.end_helpers()
        self._owned.close()

    def status(self) -> EngineStatus:
        n_ctx, n_held = self.n_ctx_seq, self._n_held()
        slots = [SlotStatus(id=i, state="idle", n_ctx=n_ctx) for i in range(self.n_slots)]
        for request in self._running:
            slots[request.slot] = self._slot_status(request)
        return EngineStatus(
            slots=tuple(slots),
            waiting=waiting_status(self._waiting),
            counters=attrs.evolve(
                self._counters,
                n_cells=self._owned.n_ctx,
                n_cells_used=n_held,
                n_cells_running=n_held,
                **self._threads.counters(),
            ),
        )

    @abc.abstractmethod
    def _n_held(self) -> int:
        """Count the cells that running requests hold between two steps."""

    @abc.abstractmethod
    def _slot_status(self, request: _Request) -> SlotStatus:
        """Describe the slot of a request."""
