"""A shortlist: the few candidates that a sampler chain can choose from.

With a large vocabulary, a chain spends most of its time on making candidates of all tokens, only to
keep 40 of them, or one. Where it is certain which can be chosen, it is faster to find these first.
The chain still chooses the same tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from trioserve.llama.sampling import chain
from trioserve.types import SamplingParams, TokenId

#: Logits in one block; only the largest of each block is looked at first.
_BLOCK = 128
#: With a smaller vocabulary, making all candidates takes no longer than finding the best 40.
_MIN_VOCAB = 65_536


class Shortlist:
    """Which tokens a chain has to look at.

    Args:
        params: what the request asks for.
        biases: what the chain adds to logits before all else, by token.
        n_vocab: tokens in the vocabulary.
    """

    __slots__ = ("_is_greedy", "_lowered", "_n_best", "is_useful")

    def __init__(
        self, params: SamplingParams, biases: Mapping[TokenId, float], n_vocab: int
    ) -> None:
        self._lowered = frozenset(biases)
        best = n_best(params)
        # Tokens with biases may be among the largest logits, and fall behind others later.
        self._n_best = best + len(biases)
        possible = best > 0 and all(bias <= 0 for bias in biases.values())
        self._is_greedy = possible and best == 1
        #: Whether to use it; if not, the chain looks at all tokens.
        self.is_useful = possible and (self._is_greedy or n_vocab >= _MIN_VOCAB)

    def best(self, logits: NDArray[np.float32], ids: NDArray[np.int32] | None = None) -> int | None:
        """Return the index of the only logit to look at; None: there are more, or it is NaN."""
        if not self._is_greedy:
            return None
        best = int(logits.argmax())  # or the first NaN
        token = best if ids is None else int(ids[best])
        return best if token not in self._lowered and math.isfinite(logits[best]) else None

    def places(
        self, logits: NDArray[np.float32], ids: NDArray[np.int32] | None = None
    ) -> NDArray[np.intp] | None:
        """Return the indices of the logits to look at; None: all, some of which may be no numbers.

        Args:
            logits: of all tokens, or of those that a grammar allows.
            ids: which tokens these are; None: all.
        """
        best = self.best(logits, ids)
        if best is not None:
            return np.array([best])
        n_blocks = len(logits) // _BLOCK
        if self._n_best > n_blocks // 2:
            return None
        blocks = logits[: n_blocks * _BLOCK].reshape(_BLOCK, n_blocks)
        # In each of `_n_best` blocks a logit reaches this bound, so none of the best is cut off.
        largest = blocks.max(axis=0)  # or NaN
        rest = logits[n_blocks * _BLOCK :].max(initial=-np.inf)
        if not math.isfinite(largest.max()) or not rest < np.inf:
            return None
        bound = np.partition(largest, -self._n_best)[-self._n_best]
        return np.flatnonzero(logits >= bound)


def n_best(params: SamplingParams) -> int:
    """Return how many of the largest logits a chain can choose from, before biases; 0: all."""
    if params.mirostat:
        return 0
    n = 0
    exact = True  # no sampler so far depended on the probabilities of all tokens
    for name in params.samplers:
        if name == "top_k" and params.top_k > 0:
            n = n or (params.top_k if exact else 0)
        elif name == "temperature":
            if params.temperature <= 0 and not params.dynatemp_range:
                return 1
            exact &= not params.dynatemp_range
        elif name == "top_p":
            exact &= params.top_p >= 1
        elif name != "min_p" and _is_on(name, params):
            break  # it may drop the most probable tokens
    return n


def _is_on(name: str, params: SamplingParams) -> bool:
    match name:
        case "penalties":
            return chain.uses_penalties(params)
        case "dry":
            return chain.uses_dry(params)
        case "top_n_sigma":
            return params.top_n_sigma > 0
        case "typ_p":
            return params.typical_p < 1
        case "xtc":
            return params.xtc_probability > 0
        case "top_k":
            return params.top_k > 0
    return True
