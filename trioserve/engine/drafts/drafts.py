"""`Drafts`: asks the drafters before each tick, and tells them what became of their drafts."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from trioserve.engine.drafter import Drafter, DraftRequest
from trioserve.engine.run import Run
from trioserve.engine.scheduler import Scheduler
from trioserve.engine.slot import Slot


@attrs.define
class _Drafted:
    """What is known of a slot's run."""

    key: tuple[int, int]  # changes when what the drafters know of the slot is void
    drafter: Drafter | None = None  # who made the draft that is being checked


class Drafts:
    """Gives drafts to the slots in decode. One drafter after the other is asked for each slot.

    Args:
        scheduler: has the slots.
        drafters: those to ask, in this order.
    """

    def __init__(self, scheduler: Scheduler, drafters: Sequence[Drafter]) -> None:
        self._scheduler = scheduler
        self._drafters = tuple(drafters)
        self._known: dict[int, _Drafted] = {}

    def use(self, drafters: Sequence[Drafter]) -> None:
        """Ask these, in this order, and no others. To be called before the first tick."""
        self._drafters = tuple(drafters)

    def propose(self) -> None:
        """Give drafts to slots. To be called before `Scheduler.schedule`."""
        if not self._drafters:
            return
        wanting = self._forget_others()
        for drafter in self._drafters:
            wanting = self._ask(drafter, wanting)

    def settle(self, slot: Slot, n_accepted: int) -> None:
        """Keep what was accepted of a slot's draft in its sequence, and cut the rest."""
        run = slot.run
        assert run is not None
        n_draft = len(run.draft)
        self._scheduler.roll_back(slot, n_draft - n_accepted)
        known = self._known.get(slot.id)
        if known is not None and known.drafter is not None:
            drafter, known.drafter = known.drafter, None
            drafter.observe(slot.id, n_draft, n_accepted)

    def close(self) -> None:
        """Close the drafters."""
        for drafter in self._drafters:
            drafter.close()

    def _forget_others(self) -> list[tuple[Slot, Run]]:
        """Forget what slots have no longer; returns those that may have drafts."""
        wanting = []
        for slot in self._scheduler.slots:
            run, known = slot.run, self._known.get(slot.id)
            key = None if run is None else (run.task.id, run.n_discarded)
            if known is not None and known.key != key:
                del self._known[slot.id]
                for drafter in self._drafters:
                    drafter.forget(slot.id)
            if run is not None and slot.in_decode and not run.paused and not run.draft:
                wanting.append((slot, run))
        return wanting

    def _ask(self, drafter: Drafter, slots: list[tuple[Slot, Run]]) -> list[tuple[Slot, Run]]:
        """Ask a drafter for drafts; returns the slots that it has none for."""
        asked, requests = [], []
        for slot, run in slots:
            room = self._scheduler.room_for_draft(slot) // len(slots)
            n_max = min(room, run.n_left - 1)
            if n_max > 0:
                asked.append((slot, run))
                requests.append(DraftRequest(slot.id, run.keys, run.task.root, n_max))
        if not requests:
            return []
        left = []
        for (slot, run), draft in zip(asked, drafter.propose(requests), strict=True):
            known = self._known.setdefault(slot.id, _Drafted((run.task.id, run.n_discarded)))
            if draft:
                self._scheduler.propose(slot, draft)
                known.drafter = drafter
            else:
                left.append((slot, run))
        return left
