"""What the engine counts: additions to plain numbers, a few in each step, none for a token."""

from __future__ import annotations

from trioserve.engine.decoder import Threads
from trioserve.engine.scheduler import Scheduler
from trioserve.engine.slot import RequestState
from trioserve.types import EngineCounters


class Counters:
    """Totals since the start of an engine. Used from the inference thread."""

    __slots__ = (
        "_accepted",
        "_busy_slots",
        "_cached_tokens",
        "_decodes",
        "_drafted",
        "_drafts",
        "_n_tokens_max",
        "_predicted_tokens",
        "_prompt_queries",
        "_prompt_s",
        "_prompt_tokens",
        "_step_s",
        "_steps",
    )

    def __init__(self) -> None:
        self._steps = self._decodes = self._busy_slots = 0
        self._step_s = self._prompt_s = 0.0
        self._prompt_tokens = self._prompt_queries = self._cached_tokens = 0
        self._predicted_tokens = self._n_tokens_max = 0
        self._drafts = self._drafted = self._accepted = 0

    def count_step(self, seconds: float) -> None:
        """Count a step, whatever came of it."""
        self._steps += 1
        self._step_s += seconds

    def count_decode(self, n_slots: int, n_prefill: int, seconds: float) -> None:
        """Count a batch that was computed: the slots in it, and its prompt tokens."""
        self._decodes += 1
        self._busy_slots += n_slots
        if n_prefill:
            self._prompt_tokens += n_prefill
            self._prompt_s += seconds

    def count_admission(self, request: RequestState) -> None:
        """Count what of a prompt was in the cache."""
        self._prompt_queries += request.n_prompt
        self._cached_tokens += request.cached

    def count_end(self, request: RequestState) -> None:
        """Count a request that has ended, however."""
        if request.admitted_at is not None:
            self._predicted_tokens += request.n_output
            self._n_tokens_max = max(self._n_tokens_max, len(request.keys))
            self._drafts += request.n_drafts
            self._drafted += request.n_drafted
            self._accepted += request.n_accepted

    def status(self, scheduler: Scheduler, threads: Threads) -> EngineCounters:
        """Sum up, with the requests that have not ended."""
        held = (slot.n_held for slot in scheduler.slots)
        return EngineCounters(
            steps=self._steps,
            step_s=self._step_s,
            decodes=self._decodes,
            busy_slots=self._busy_slots,
            prompt_tokens=self._prompt_tokens,
            prompt_s=self._prompt_s,
            prompt_queries=self._prompt_queries,
            cached_tokens=self._cached_tokens,
            predicted_tokens=self._predicted_tokens
            + sum(request.n_output for request in scheduler.requests()),
            n_tokens_max=max(self._n_tokens_max, *held),
            drafts=self._drafts + sum(request.n_drafts for request in scheduler.requests()),
            draft_tokens=self._drafted + sum(request.n_drafted for request in scheduler.requests()),
            accepted_tokens=self._accepted
            + sum(request.n_accepted for request in scheduler.requests()),
            n_cells=scheduler.n_ctx,
            n_cells_used=scheduler.cache.taken,
            n_cells_running=scheduler.cache.taken_by_running(),
            **threads.counters(),
        )
