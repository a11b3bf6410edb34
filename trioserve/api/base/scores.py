"""The scores of tokens: the candidates for each token of an output, and those of a prompt."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from itertools import count
from typing import Any, TypeAlias, TypeVar

from msgspec import UNSET, UnsetType

from trioserve import types
from trioserve.api.base.answers import Answer
from trioserve.api.base.sse import LazyList

#: Stands for a probability of 0, whose logarithm JSON has no number for.
_LOWEST = -3.4028234663852886e38

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Candidate(Answer):
    """A token with its probability, or the logarithm of it."""

    id: int
    token: str
    bytes: Sequence[int]
    logprob: float | UnsetType = UNSET
    prob: float | UnsetType = UNSET


class TokenProbs(Candidate):
    """A token of an output, and the candidates for its place."""

    top_logprobs: Sequence[Candidate] | UnsetType = UNSET
    top_probs: Sequence[Candidate] | UnsetType = UNSET


_C = TypeVar("_C", bound=Candidate)


class _PromptLogprob(Answer):
    """A token of a prompt, or a candidate for its place, as vLLM writes it."""

    logprob: float
    rank: int
    decoded_token: str


def candidates_of(
    values: Sequence[types.TokenProbs], *, post_sampling: bool, n_top: int | None = None
) -> Sequence[TokenProbs]:
    """Write the candidates for each token, or only the first `n_top`."""
    key, list_key = ("prob", "top_probs") if post_sampling else ("logprob", "top_logprobs")

    def one(kind: type[_C], candidate: types.TokenProb, **more: Any) -> _C:
        figure = {key: figure_of(candidate, post_sampling=post_sampling)}
        piece = candidate.piece
        return kind(candidate.id, decode_piece(piece), list(piece), **figure, **more)

    def write(each: types.TokenProbs) -> TokenProbs:
        tops = [one(Candidate, top) for top in each.top[:n_top]]
        return one(TokenProbs, each.chosen, **{list_key: tops})

    return LazyList(write, values)


#: The scores of a prompt as vLLM writes them: null for the first token, and for each other one
#: an object that has it and the candidates for its place, by their ids.
PromptLogprobs: TypeAlias = Sequence[dict[str, _PromptLogprob] | None]


def prompt_logprobs(scores: types.PromptScores, n_top: int) -> PromptLogprobs:
    """Write the scores of a prompt, with `n_top` candidates for each token."""

    def write(index: int) -> dict[str, _PromptLogprob] | None:
        if not index:
            return None
        each = scores[index - 1]
        ranked = [(each.chosen, each.rank), *zip(each.top[:n_top], count(1))]
        return {
            str(one.id): _PromptLogprob(
                figure_of(one, post_sampling=False), rank, decode_piece(one.piece)
            )
            for one, rank in ranked
        }

    return LazyList(write, range(len(scores) + 1))


def figure_of(candidate: types.TokenProb, *, post_sampling: bool) -> float:
    """The probability of a candidate after sampling, or else its logarithm, which is finite."""
    return math.exp(candidate.logprob) if post_sampling else max(candidate.logprob, _LOWEST)


def decode_piece(piece: bytes) -> str:
    """Decode a token, without an incomplete character at its end."""
    return _Utf8Decoder("replace").decode(piece)
