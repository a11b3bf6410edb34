"""Calls that wait for a slot to be idle."""

from __future__ import annotations

from collections.abc import Sequence

from trioserve.engine.inbox import SlotCall
from trioserve.engine.slot import Slot


class SlotCalls:
    """Calls of functions, each for a time when its slot has no run."""

    def __init__(self) -> None:
        self.waiting: list[SlotCall] = []

    def make(self, slots: Sequence[Slot]) -> None:
        """Make those whose slots are idle now, before another run takes them."""
        waiting, self.waiting = self.waiting, []
        for call in waiting:
            if slots[call.slot_id].run is None:
                call.function()
            else:
                self.waiting.append(call)
