"""How a tick is shared between decode and prefill."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class BatchStrategy(Protocol):
    """Decides how many prompt tokens go into a tick.

    Every slot in decode gets its one token in every tick; what a strategy decides is the rest.
    """

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Say how many tokens each prompt gets in this tick.

        Args:
            pending: tokens still to prefill of each prompt, the oldest first.
            n_decode: how many slots decode in this tick.
            budget: the most tokens to give, all together.

        Returns:
            One number for each prompt, from 0 to its pending ones; at most `budget` in sum.
        """


class DecodeMaximal:
    """Keep decoding quick: prompts share one ubatch a tick while others decode.

    The oldest prompt comes first, so that it is done first. With nobody to hold up, prompts get
    all of the batch.
    """

    def __init__(self, n_ubatch: int) -> None:
        self._n_ubatch = n_ubatch

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        """Give the oldest prompt all it can use, then the next one."""
        left = min(budget, max(1, self._n_ubatch - n_decode)) if n_decode else budget
        shares = []
        for n_pending in pending:
            n_tokens = min(n_pending, left)
            left -= n_tokens
            shares.append(n_tokens)
        return shares
