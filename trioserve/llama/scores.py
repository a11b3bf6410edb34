"""Scores: how probable the tokens of a prompt are, from the logits of a batch."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from trioserve.errors import DecodeError
from trioserve.llama.sampler import NOT_FINITE, largest
from trioserve.types import PromptScores, TokenId


def add_score(scores: PromptScores, logits: NDArray[np.float32], token: TokenId) -> None:
    """Add how probable a token is by these logits, and the candidates for its place.

    It takes no copy of the logits: they are overwritten.

    Raises:
        DecodeError: a logit is NaN, or the largest is infinite.
    """
    highest = float(logits[logits.argmax()])  # or NaN
    if not math.isfinite(highest):
        raise DecodeError(NOT_FINITE)
    chosen = float(logits[token])
    rank = int(np.count_nonzero(logits >= chosen))
    best = [(id_, float(logits[id_])) for id_ in largest(logits, scores.n_top)]
    logits -= np.float32(highest)
    np.exp(logits, out=logits)
    base = highest + math.log(float(logits.sum(dtype=np.float64)))
    scores.add(token, chosen - base, rank, [(id_, logit - base) for id_, logit in best])
