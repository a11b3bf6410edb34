"""Turns of LoRA adapters: runs with different ones cannot be in one batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import monotonic

from trioserve.types import Adapters


class AdapterTurns:
    """Sets of LoRA adapters take turns: llama.cpp computes a whole batch with one set of them.

    A turn lasts for some time, because a change of adapters takes some. It ends early when no run
    with these adapters has anything to do. A new set of adapters goes to the end of the order.

    Args:
        seconds: how long a turn lasts while others wait; at least a step.
        now: tells the time.
    """

    def __init__(self, seconds: float, now: Callable[[], float] = monotonic) -> None:
        self._seconds = seconds
        self._now = now
        self._until = 0.0
        self._order: list[Adapters] = [()]  # the first one has the turn

    @property
    def current(self) -> Adapters:
        """The adapters that have the turn."""
        return self._order[0]

    def take(self, requested: Sequence[Adapters]) -> Adapters:
        """Say which of `requested` has this step. Where it is empty, nothing changes."""
        if not requested:
            return self.current
        now, before = self._now(), self.current
        order = [one for one in self._order if one in requested]
        order += [one for one in dict.fromkeys(requested) if one not in order]
        if order[0] == before and now >= self._until:
            order.append(order.pop(0))
        if order[0] != before:
            self._until = now + self._seconds
        self._order = order
        return order[0]
