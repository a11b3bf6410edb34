"""Calls that wait for a slot to be idle, and what they may do with what it has computed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trioserve.engine.backend import Backend
from trioserve.engine.loop import EngineLoop, SlotCall
from trioserve.engine.planner import StepPlan
from trioserve.engine.scheduler import Scheduler
from trioserve.engine.slot import Slot
from trioserve.errors import InvalidRequestError
from trioserve.types import Adapters, SlotState


class SlotCalls:
    """Calls of functions, each for a time when its slot has no request."""

    def __init__(self) -> None:
        self.waiting: list[SlotCall] = []

    def make(self, slots: Sequence[Slot]) -> None:
        """Make those whose slots are idle now, before another request takes them."""
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            if slots[call.slot_id].request is None:
                call.function()
            else:
                self.waiting.append(call)


class SlotLoop(EngineLoop):
    """A loop with slots, and what may be asked of those that are idle."""

    _backend: Backend
    _scheduler: Scheduler

    # -- from any thread

    def call_slot(self, slot_id: int, function: Callable[[], None]) -> None:
        """Call a function on the inference thread, as soon as a slot is idle.

        Raises InvalidRequestError if there is no such slot.
        """
        if not 0 <= slot_id < self.n_slots:
            raise InvalidRequestError("Invalid slot ID", param="id_slot")
        self.inbox.put(SlotCall(slot_id, function))

    def write_slot_file(self, path: Path, saved: SlotState) -> int:
        """Write what `save_slot` returned; see `Backend.write_state`. In a worker thread."""
        return self._backend.write_state(path, saved)

    def read_slot_file(self, path: Path, adapters: Adapters) -> tuple[SlotState, int]:
        """Read a file for `restore_slot`; see `Backend.read_state`. In a worker thread."""
        return self._backend.read_state(path, adapters)

    # -- what an idle slot has computed. Use these three through `call_slot`

    def save_slot(self, slot_id: int, owner: str) -> SlotState:
        """Read what a slot ran last, or what is left of it; raises as `Scheduler.save`."""
        return self._scheduler.save(self._scheduler.slots[slot_id], owner)

    def restore_slot(self, slot_id: int, saved: SlotState) -> None:
        """Make a saved text that of a slot, for later prompts that begin with it, in any slot.

        Raises:
            KVCacheFullError: what runs leaves no room for it.
            InvalidRequestError: the state does not fit the context, or is of other tokens.
        """
        self._scheduler.restore(self._scheduler.slots[slot_id], saved)

    def erase_slot(self, slot_id: int, owner: str) -> int:
        """Forget what a slot ran last; returns and raises as `Scheduler.erase`."""
        return self._scheduler.erase(self._scheduler.slots[slot_id], owner)

    # -- what is recorded of a step, if somebody watches

    def _note_batch(self, plan: StepPlan) -> None:
        n_prefill = plan.n_prefill
        self._in_batch = (len(plan), plan.n_cells - n_prefill, n_prefill)

    def _load(self) -> tuple[int, int]:
        slots, queue = self._scheduler.slots, self._scheduler.waiting
        n_running = sum(slot.request is not None for slot in slots)
        return n_running, len(queue) + len(self._scheduler.stalled)
