"""`Background`: how much of the steps requests of low priority get beside others."""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Sequence

from trioserve.engine.slot import Slot
from trioserve.engine.step_costs import StepCosts
from trioserve.engine.strategy import MIN_TOKENS, TILE


class Background:
    """Lets requests with a priority below 0 into steps, beside those of others.

    Without others, its prompts get as much of a step as where nothing decodes, because no reader
    waits for its streams; a request that arrives ends the step. Beside others, it gets a share of
    the time, and is in a step when the share pays for all of its streams, and for a tile of its
    prompts. Where more rows cost nearly nothing, that is each step. Elsewhere, readers of others
    get their tokens at a pace that is slower than the steps, which gives a credit: the time that
    these tokens are ahead of their readers. Once it pays for a longer step, the background is in
    one::

        step     | others | others | others | others and background         |
        tokens            a        b        c                               d
        readers                a            b            c            d

    The credit has a bound, for readers hold few tokens. When that does not pay for everything, the
    background gets what fits, and at least one row, so that it never stands still.
    """

    #: What the background may add to the time of the others.
    SHARE = 0.25
    #: A step without the background counts as at most this many times what it took before: other
    #: threads may have had the core. If that made the pace slower, the background would get more.
    MOST = 1.2
    #: A factor for estimates of longer steps: a step that takes longer than estimated is a gap.
    CAUTION = 1.2
    #: Tokens that readers may be ahead; fewer than they hold before they send all at once.
    AHEAD = 12

    def __init__(self) -> None:
        self.costs = StepCosts()
        self._credit_s = 0.0
        #: Seconds between two tokens for readers; 0: as they come.
        self.pace = 0.0
        #: In this step, both the background and others have something to do.
        self.is_beside = False
        #: In this step, only the background has something to do.
        self.is_alone = False
        self._most_s = 0.0  # the bound of the credit
        self._was_beside = self._was_paced = False  # the last step
        self._last_turn = -1  # the slot of the last stream that was in a step
        self._was_prefill = False  # the last turn that was too short for all was for prompts

    def share(self, slots: Sequence[Slot]) -> tuple[Sequence[Slot], int]:
        """Choose what is in the next step.

        Args:
            slots: all that have something to do.

        Returns:
            Those that may be in it, and how many tokens prompts of the background get beside
            others, in place of their prompts.
        """
        behind, others = list[Slot](), list[Slot]()
        for slot in slots:
            assert slot.request is not None
            (behind if slot.request.is_background else others).append(slot)
        self.pace = 0.0
        self.is_beside, self.is_alone = bool(behind and others), bool(behind and not others)
        if not self.is_beside:
            self._credit_s, self._was_beside, self._was_paced = 0.0, False, False
            return slots, 0
        n_rows = sum(slot.n_pending for slot in others if slot.in_decode) or 1
        plain_s = self.costs.seconds(n_rows)
        step_s = (1 + self.SHARE) * plain_s
        self._most_s = self.AHEAD * step_s
        if not plain_s:
            return others, 0  # first measure what others take
        self.pace = step_s
        streams, n_prefill = self._choose(behind, n_rows, plain_s)
        if not streams and not n_prefill:
            return others, 0
        if streams:
            self._last_turn = streams[-1].id
        prompts = [slot for slot in behind if not slot.in_decode] if n_prefill else []
        return [*others, *streams, *prompts], n_prefill

    def _choose(self, behind: list[Slot], n_rows: int, plain_s: float) -> tuple[list[Slot], int]:
        """Choose streams of the background, and how many tokens its prompts get."""
        streams = [slot for slot in behind if slot.in_decode]
        streams.sort(key=lambda slot: slot.id <= self._last_turn)
        n_most = max(1, self.costs.largest_step - n_rows)
        streams = _fitting(streams, n_most)
        n_stream = sum(slot.n_pending for slot in streams)
        n_prompt = sum(slot.n_pending for slot in behind if not slot.in_decode)
        n_prompt = min(n_prompt, TILE, max(0, n_most - n_stream))

        def extra(n_cells: int) -> float:
            return self.CAUTION * (self.costs.seconds(n_rows + n_cells) - plain_s)

        own_s, whole_s = self.SHARE * plain_s, extra(n_stream + n_prompt)
        if whole_s <= self._credit_s + own_s:
            if whole_s <= own_s:  # readers need not be ahead, and get what they are at once
                self.pace = 0.0
            return streams, n_prompt
        if streams and extra(n_stream) <= own_s / 2:
            return streams, 0  # and there will be enough for prompts nevertheless
        if self._credit_s < self._most_s:
            return [], 0
        counts = range(1, n_stream + n_prompt)
        n_fitting = max((n for n in counts if extra(n) <= self._credit_s), default=1)
        self._was_prefill = bool(n_prompt) and not (self._was_prefill and streams)
        if self._was_prefill:
            return [], min(n_prompt, max(MIN_TOKENS, n_fitting))
        return _fitting(streams, n_fitting), 0

    def observe(self, n_cells: int, n_others: int, seconds: float, interval: float) -> float:
        """Learn from a step beside others.

        Args:
            n_cells: all of its cells.
            n_others: those that are not of the background.
            seconds: how long it took.
            interval: seconds since the end of the step before, which readers see.

        Returns:
            How long it would have taken without the background.
        """
        interval = interval if self._was_beside else seconds
        known_s = self.costs.seconds(n_others) if n_others else 0.0
        if n_others == n_cells:
            plain_s = interval
            self.costs.observe(n_cells, min(interval, self.MOST * known_s) if known_s else interval)
        else:
            plain_s = min(interval, known_s)
            self.costs.observe(n_cells, interval)
        if self.pace and self._was_paced:
            credit = max(0.0, self._credit_s + self.pace - interval)
        else:  # readers are not ahead, and there may be a debt
            credit = min(0.0, self._credit_s + (1 + self.SHARE) * plain_s - interval)
        self._was_beside, self._was_paced = True, bool(self.pace)
        self._credit_s = max(-self._most_s, min(credit, self._most_s))
        return min(plain_s, seconds)


def _fitting(streams: Sequence[Slot], n_rows: int) -> list[Slot]:
    """Take as many streams as have no more rows than these together, and at least the first one."""
    ends = list(itertools.accumulate(slot.n_pending for slot in streams))
    return list(streams[: max(1, bisect_right(ends, n_rows))])
