"""`Decoder`: runs the batch of a step, and ends it early when its prompt is cancelled."""

from __future__ import annotations

from trioserve.engine.backend import Backend
from trioserve.engine.encoder import Encoder
from trioserve.engine.threads import Threads
from trioserve.engine.work import Plan
from trioserve.errors import DecodeInterruptedError
from trioserve.types import Adapters

#: A decode of fewer tokens of a prompt ends soon by itself.
MIN_INTERRUPTED = 64


class Decoder:
    """Fills the backend's batch, and decodes it with the right adapters and threads."""

    def __init__(self, backend: Backend, encoder: Encoder | None = None) -> None:
        self.threads = Threads(backend, backend.interrupt, encoder)
        self._backend = backend
        self._adapters: Adapters = ()  # that the backend has set
        self._task_id: int | None = None  # whose prompt most of the batch is
        self._was_interrupted = False

    def decode(self, plan: Plan, adapters: Adapters) -> list[int]:
        """Decode one batch; returns the row to sample from of each slot in it.

        Raises:
            DecodeError: as `Backend.decode`, and when the adapters cannot be used.
        """
        if adapters != self._adapters:
            self._backend.set_adapters(adapters)
            self._adapters = adapters
        try:
            rows = self._decode_media(plan) if plan.is_media else self._decode_tokens(plan)
            self._was_interrupted = False
        except DecodeInterruptedError:
            self._was_interrupted = True
            raise
        finally:
            self._task_id = None
        return rows

    def _decode_tokens(self, plan: Plan) -> list[int]:
        batch = self._backend.batch
        batch.clear()
        rows = plan.fill(batch)
        if rows[-1] >= MIN_INTERRUPTED and plan.others:  # not on the way of every token
            self._task_id = self._interruptible(plan)
        self.threads.run(_n_tokens(plan, rows[-1]), self._backend.decode)
        return rows

    def _decode_media(self, plan: Plan) -> list[int]:
        pieces, rows = plan.media(), list[int]()
        self._task_id = self._interruptible(plan)

        def compute() -> None:
            rows[:] = self._backend.decode_media(pieces)

        self.threads.run(plan.n_cells, compute)
        return rows

    def cancel(self, task_id: int) -> None:
        """End the decode if it is mostly for the prompt of this task. From any thread.

        If that crosses with its end, the next one is ended, and begins again.
        """
        if task_id == self._task_id:
            self._backend.interrupt()

    def _interruptible(self, plan: Plan) -> int | None:
        """Find the task that has at least half of the batch.

        What others lose has to be decoded again, so they lose no two batches in a row.
        """
        largest = max(plan.others, key=lambda piece: piece.n_cells)
        n_others = plan.n_cells - largest.n_cells
        if largest.n_cells < max(MIN_INTERRUPTED, n_others):
            return None
        if n_others and self._was_interrupted:
            return None
        assert largest.slot.run is not None
        return largest.slot.run.task.id


def _n_tokens(plan: Plan, last_row: int) -> int:
    """Count the tokens of a batch, in which a draft may follow the last row to sample from."""
    last = plan.others[-1].slot.run if plan.others else None
    return last_row + 1 + (len(last.draft) if last is not None else 0)
