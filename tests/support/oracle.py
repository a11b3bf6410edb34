"""A drafter that knows the output of a model, and is wrong at a given rate."""

from __future__ import annotations

import random
from collections.abc import Sequence

from trioserve.engine import DraftRequest
from trioserve.types import TokenId


class Oracle:
    """Guesses the rest of known texts.

    Args:
        texts: prompts with their outputs.
        right: how likely each token is right; with 1, drafts are as long as they may be.
        n_max: the most tokens of a draft.
    """

    name = "oracle"
    is_free = True
    pays = True
    step_s = 0.0

    def __init__(
        self, texts: Sequence[Sequence[TokenId]], right: float = 1.0, n_max: int = 64
    ) -> None:
        self.texts = [list(text) for text in texts]
        self.n_max, self._right = n_max, right
        self._random = random.Random(7)

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[TokenId]]:
        """Guess; wrong tokens are any that are text."""
        return [self._guess(list(one.keys), one.n_max) for one in requests]

    def _guess(self, keys: list[TokenId], n_max: int) -> list[TokenId]:
        text = next((one for one in self.texts if one[: len(keys)] == keys), keys)
        n_max = min(n_max, self.n_max)
        n = n_max if self._right == 1 else self._random.randint(0, min(n_max, 12))
        return [
            token if self._random.random() <= self._right else self._random.randrange(300, 350)
            for token in text[len(keys) : len(keys) + n]
        ]

    def forget(self, slot_id: int) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""
