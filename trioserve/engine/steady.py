"""`SteadyPlan`: a step that differs from the one before in nothing but its tokens.

With hundreds of streams, nearly all steps are like that: no command has come, no request has begun
or ended, and there is no prompt and no draft. Then there is nothing to decide: each stream
decodes the token that was sampled last, one position further. What only depends on the requests is
kept in columns, from step to step.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from trioserve.engine.backend import Batch
from trioserve.engine.cache.prefix_cache import PrefixCache
from trioserve.engine.planner import StepPlan
from trioserve.engine.slot import RequestState
from trioserve.types import TokenId


class SteadyPlan(StepPlan):
    """Decodes the newest token of each stream, after a step that has decoded the one before.

    It holds until the engine takes a command, or a token means more than text.

    Args:
        plan: of the step before, which had streams only, all of them `is_plain`.
    """

    def __init__(self, plan: StepPlan) -> None:
        super().__init__(plan.streams, ())
        self._rows = list(range(len(plan.streams)))
        self.texts = [request.keys for request in self.requests]
        self.task_ids = [request.task.id for request in self.requests]
        self.samples = [request.sampler.sample for request in self.requests if request.sampler]
        #: Tokens that each output may still have before one of them is looked at more closely.
        self.n_left = min(request.n_simple - len(request.keys) for request in self.requests)

    def fill(self, batch: Batch) -> list[int]:
        """Put the newest tokens into the batch, which has those before them."""
        batch.advance(self.keys)
        return self._rows

    def note(self, cache: PrefixCache) -> None:
        """Record that they were decoded."""
        cache.held.append_each(self.seqs, self.keys)

    def go_on(self, tokens: Sequence[TokenId]) -> None:
        """Add the tokens that were sampled to the texts; the next step decodes them."""
        deque(map(list.append, self.texts, tokens), maxlen=0)
        self.keys = list(tokens)
        self.n_left -= 1


def is_plain(request: RequestState) -> bool:
    """Whether sampling gives one token, and nothing else decides what it is."""
    return not (
        request.draft
        or request.forced
        or request.task.params.n_probs
        or request.task.constraint is not None
    )
