"""Who runs, and with how many tokens: decisions only. No clock, no thread, no llama.cpp."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from trioserve.engine.queue import WaitingQueue
from trioserve.engine.run import Run
from trioserve.engine.slot import Slot
from trioserve.engine.strategy import BatchStrategy


@attrs.frozen
class Work:
    """A slot's part of a tick: decode its next `n_tokens` pending tokens."""

    slot: Slot
    n_tokens: int


class Scheduler:
    """Assigns runs to slots and fills ticks.

    Args:
        n_slots: requests that run at the same time; slot `i` owns KV sequence `i`.
        n_ctx: cells in the KV cache, all sequences together.
        n_ctx_seq: the most tokens of one sequence.
        n_batch: the most tokens of one tick; at least `n_slots`.
        can_cut: whether a sequence can be cut at any position, or only cleared.
        strategy: how a tick is shared between decode and prefill.
    """

    def __init__(
        self,
        *,
        n_slots: int,
        n_ctx: int,
        n_ctx_seq: int,
        n_batch: int,
        can_cut: bool,
        strategy: BatchStrategy,
    ) -> None:
        self.slots = [Slot(i) for i in range(n_slots)]
        self.waiting = WaitingQueue()
        self.n_ctx = n_ctx
        self.n_ctx_seq = n_ctx_seq
        self.n_batch = n_batch
        self.can_cut = can_cut
        self._strategy = strategy
        self._cuts: list[tuple[int, int]] = []
        self._tick = 0

    # -- what comes in and goes out

    def add(self, run: Run) -> None:
        """Put a new run in the queue."""
        self.waiting.push(run)

    def find(self, task_id: int) -> Run | None:
        """Find a run, waiting or in a slot."""
        for slot in self.slots:
            if slot.run is not None and slot.run.task.id == task_id:
                return slot.run
        return self.waiting.get(task_id)

    def runs(self) -> Iterator[Run]:
        """Go through all runs: first those in slots, then those that wait."""
        for slot in self.slots:
            if slot.run is not None:
                yield slot.run
        yield from self.waiting

    def remove(self, task_id: int) -> Run | None:
        """Take a run out, wherever it is. Its slot is idle from now on."""
        for slot in self.slots:
            if slot.run is not None and slot.run.task.id == task_id:
                return slot.give_up(self._tick)
        return self.waiting.remove(task_id)

    @property
    def has_work(self) -> bool:
        """Whether the next tick has anything to do."""
        if any(slot.run is not None and not slot.run.paused for slot in self.slots):
            return True
        return next(self._admissible(), None) is not None

    # -- one tick

    def schedule(self) -> list[Work]:
        """Decide what the next tick decodes. `take_cuts` says what must be cut before."""
        self._tick += 1
        while (next_one := next(self._admissible(), None)) is not None:
            run, slot = next_one
            self.waiting.remove(run.task.id)
            n_keep = self._reusable(slot, run)
            self._cut(slot, n_keep)
            slot.take(run, n_keep)
        self._make_room()
        return self._share()

    def take_cuts(self) -> list[tuple[int, int]]:
        """Take the KV sequences that are to be cut, and how many tokens each keeps."""
        cuts, self._cuts = self._cuts, []
        return cuts

    def _admissible(self) -> Iterator[tuple[Run, Slot]]:
        """Go through the runs that can start now, each with its slot, in order of arrival."""
        if all(slot.run is not None for slot in self.slots):
            return
        for run in self.waiting:
            slot = self._best_slot(run)
            if slot is None:
                continue  # it waits for a slot of its choice; those behind it need not
            if not self._fits(run):
                return
            yield run, slot

    def _best_slot(self, run: Run) -> Slot | None:
        """Choose the idle slot that holds most of the prompt, else the one unused for longest."""
        wanted = run.task.options.id_slot
        slots = self.slots if wanted < 0 else self.slots[wanted : wanted + 1]
        idle = [slot for slot in slots if slot.run is None]
        if len(idle) < 2:
            return idle[0] if idle else None
        return max(idle, key=lambda slot: (self._worth(slot, run), -slot.last_used, -slot.id))

    def _worth(self, slot: Slot, run: Run) -> int:
        """Count the tokens that the slot saves; few are not worth what it would forget."""
        shared = self._reusable(slot, run)
        return shared if shared * 10 >= len(run.tokens) else 0

    def _reusable(self, slot: Slot, run: Run) -> int:
        if not run.task.options.cache_prompt:
            return 0
        shared = slot.shared_prefix(run.tokens)
        return shared if self.can_cut or shared == len(slot.held) else 0

    def _fits(self, run: Run) -> bool:
        """Whether the run's tokens, and one more, fit beside what runs already.

        What idle slots hold does not count: it gives way.
        """
        taken = sum(len(slot.run.tokens) for slot in self.slots if slot.run is not None)
        return taken + len(run.tokens) + 1 <= self.n_ctx

    def _make_room(self) -> None:
        """Free cells until every slot can decode one more token.

        First the idle slots forget, the one unused for longest first. Then the youngest run goes
        back to the queue; what it has generated stays with it.
        """
        while self._overfull():
            idle = [slot for slot in self.slots if slot.run is None and slot.held]
            if idle:
                self._cut(min(idle, key=lambda slot: slot.last_used), 0)
                continue
            self.preempt(youngest([slot for slot in self.slots if slot.run is not None]))

    def _overfull(self) -> bool:
        held = sum(len(slot.held) for slot in self.slots)
        pending = sum(slot.n_pending for slot in self.slots if slot.run is not None)
        return held + pending > self.n_ctx

    def preempt(self, slot: Slot) -> Run:
        """Put a slot's run back at the front of the queue and forget its KV cache."""
        run = slot.give_up(self._tick)
        self._cut(slot, 0)
        self.waiting.push_front(run)
        return run

    def _share(self) -> list[Work]:
        """Give every decoding slot its token and the prompts what the strategy says."""
        active = [slot for slot in self.slots if slot.run is not None and not slot.run.paused]
        decode = [Work(slot, 1) for slot in active if slot.in_decode]
        prefill = sorted((slot for slot in active if not slot.in_decode), key=arrival)
        if not prefill:
            return decode
        pending = [slot.n_pending for slot in prefill]
        shares = self._strategy.share(pending, len(decode), self.n_batch - len(decode))
        return decode + [
            Work(slot, n_tokens) for slot, n_tokens in zip(prefill, shares, strict=True) if n_tokens
        ]

    def _cut(self, slot: Slot, n_keep: int) -> None:
        """Shorten what a slot holds, and note it for `take_cuts`."""
        if n_keep < len(slot.held):
            del slot.held[n_keep:]
            self._cuts.append((slot.id, n_keep))

    def forget(self, slot: Slot) -> None:
        """Forget what a slot holds. After a failure, llama.cpp may hold more than is known."""
        slot.held.clear()
        self._cuts.append((slot.id, 0))

    # -- the truth about itself

    def check_integrity(self) -> None:
        """Raise AssertionError unless all that must always hold does hold."""
        ids = [run.task.id for run in self.runs()]
        assert len(ids) == len(set(ids)), "a task is in two places"
        assert sum(len(slot.held) for slot in self.slots) <= self.n_ctx, "more cells than there are"
        for slot in self.slots:
            assert len(slot.held) <= self.n_ctx_seq
            if slot.run is None:
                assert not slot.in_decode
                continue
            assert slot.run.tokens[: len(slot.held)] == slot.held, "the KV cache is another text's"
            assert slot.n_pending >= 1, "nothing left to decode"
            if slot.in_decode:
                assert slot.n_pending == 1


def arrival(slot: Slot) -> int:
    """Order busy slots by the arrival of their runs."""
    assert slot.run is not None
    return slot.run.task.id


def youngest(slots: list[Slot]) -> Slot:
    """Find the slot whose run arrived last."""
    return max(slots, key=arrival)
