"""A slot: a place for one running request, with a KV sequence of its own."""

from __future__ import annotations

import enum

from trioserve.engine.run import Run
from trioserve.types import SlotStatus, TokenId


class SlotState(enum.Enum):
    """What a slot does. It goes around: idle, prefill, decode, idle."""

    IDLE = "idle"
    PREFILL = "prefill"
    DECODE = "decode"


class Slot:
    """One slot.

    ::

        run.tokens | held ............... | pending ..... |
                   0             len(held)

    `held` are the tokens whose keys and values the KV sequence holds, exactly; an idle slot keeps
    them for a later prompt that begins the same. `pending` are decoded by the next ticks.
    """

    __slots__ = ("held", "id", "in_decode", "last_used", "run")

    def __init__(self, slot_id: int) -> None:
        self.id = slot_id
        self.held: list[TokenId] = []
        self.run: Run | None = None
        self.in_decode = False  # the run has logits to go on from, one token a tick
        self.last_used = 0  # the tick in which it was last given up

    @property
    def state(self) -> SlotState:
        """What the slot does now."""
        if self.run is None:
            return SlotState.IDLE
        return SlotState.DECODE if self.in_decode else SlotState.PREFILL

    @property
    def n_pending(self) -> int:
        """How many tokens of its run are not in the KV cache yet."""
        return 0 if self.run is None else len(self.run.tokens) - len(self.held)

    def take(self, run: Run, n_keep: int) -> None:
        """Start a run that shares the first `n_keep` tokens with what the slot holds."""
        assert self.run is None
        assert n_keep == len(self.held)
        assert n_keep < len(run.tokens), "at least one token must be decoded, to have logits"
        self.run = run
        self.in_decode = False

    def advance(self, n_tokens: int) -> None:
        """Note that the next `n_tokens` pending tokens are in the KV cache."""
        assert self.run is not None
        start = len(self.held)
        self.held += self.run.tokens[start : start + n_tokens]

    def give_up(self, tick: int) -> Run:
        """Take the run out. What is in the KV cache stays, for later prompts."""
        assert self.run is not None
        run, self.run = self.run, None
        self.in_decode = False
        self.last_used = tick
        return run

    def shared_prefix(self, tokens: list[TokenId]) -> int:
        """Count the leading tokens that the slot holds of `tokens`; always less than all."""
        limit = min(len(self.held), len(tokens) - 1)
        if self.held[:limit] == tokens[:limit]:
            return limit
        # Comparing slices is quick: halve until the first difference is found.
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.held[low:middle] == tokens[low:middle]:
                low = middle
            else:
                high = middle - 1
        return low

    def status(self, n_ctx: int) -> SlotStatus:
        """Describe the slot."""
        run = self.run
        return SlotStatus(
            id=self.id,
            state=self.state.value,
            n_ctx=n_ctx,
            task_id=run.task.id if run else None,
            n_prompt=run.n_prompt if run else 0,
            n_past=len(self.held),
            n_cached=run.cached if run else 0,
            n_decoded=run.n_output if run else 0,
            paused=run.paused if run else False,
            task=run.task if run else None,
        )
