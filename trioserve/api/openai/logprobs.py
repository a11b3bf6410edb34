"""Writes the scores of tokens as OpenAI's APIs have them: the newer one of chats, and the older."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate

from trioserve.api.base.answers import Answer
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.base.scores import (
    TokenProbs as WrittenProbs,
    candidates_of,
    decode_piece,
    figure_of,
)
from trioserve.api.base.sse import LazyList
from trioserve.types import GenerationParams, Prompt, PromptScores, TokenProb, TokenProbs


class ChatLogprobs(Answer):
    """The candidates for each token of a message, as OpenAI's chat API has them."""

    content: Sequence[WrittenProbs]
    refusal: None = None


class TextLogprobs(Answer):
    """The candidates for each token, as OpenAI's older API has them, and llama-server."""

    content: Sequence[WrittenProbs]
    tokens: Sequence[str]
    token_logprobs: Sequence[float | None]
    top_logprobs: Sequence[dict[str, float] | None]
    text_offset: Sequence[int]


def chat_logprobs(
    values: Sequence[TokenProbs], request: ChatRequest, params: GenerationParams
) -> ChatLogprobs:
    """Write the candidates for each token of a message."""
    post = params.post_sampling_probs
    return ChatLogprobs(candidates_of(values, post_sampling=post, n_top=request.top_logprobs))


def text_logprobs(
    values: Sequence[TokenProbs], params: GenerationParams, n_top: int, *, offset: int = 0
) -> TextLogprobs:
    """Write `n_top` candidates for each token of a text.

    `offset` says where in the text the first token begins, in characters.
    """
    post = params.post_sampling_probs
    figure = partial(figure_of, post_sampling=post)
    tokens = [decode_piece(each.chosen.piece) for each in values]
    return TextLogprobs(
        candidates_of(values, post_sampling=post, n_top=n_top),
        tokens,
        [figure(each.chosen) for each in values],
        LazyList(lambda each: _top(each, n_top, figure), values),
        text_offsets(values, offset)[:-1],
    )


def text_offsets(values: Sequence[TokenProbs], start: int = 0) -> list[int]:
    """Find where each token begins in a text, in characters, and where the last one ends.

    All parts of a character begin where it does.
    """
    return _offsets((each.chosen.piece for each in values), start)


def _offsets(pieces: Iterable[bytes], start: int = 0) -> list[int]:
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    return list(accumulate((len(decode(piece)) for piece in pieces), initial=start))


def _top(probs: TokenProbs, n_top: int, figure: Callable[[TokenProb], float]) -> dict[str, float]:
    """Write the best candidates, and also the chosen token."""
    candidates = (*probs.top[:n_top], probs.chosen)
    return {decode_piece(each.piece): figure(each) for each in candidates}


_NOTHING = TextLogprobs((), (), (), (), ())


def echoed_logprobs(
    text: str, prompt: Prompt, scores: PromptScores, n_top: int, written: TextLogprobs = _NOTHING
) -> TextLogprobs:
    """Write the scores of a prompt, whose text begins an answer, before those of the output.

    The first token has none. Of `written`, see `text_logprobs`, are those of the output.
    """
    figure = partial(figure_of, post_sampling=False)
    pieces = [scores.piece_of(prompt.tokens[0]), *(each.chosen.piece for each in scores)]
    tokens = [*map(decode_piece, pieces)]
    # BOS, or a space that the vocabulary adds, is not in the text.
    *starts, end = _offsets(pieces)
    offsets = [max(0, start - max(0, end - len(text))) for start in starts]
    n, rest = len(tokens), written.top_logprobs

    def top_of(index: int) -> dict[str, float] | None:
        if index >= n:
            return rest[index - n]
        return _top(scores[index - 1], n_top, figure) if index else None

    return TextLogprobs(
        written.content,
        [*tokens, *written.tokens],
        [None, *(figure(each.chosen) for each in scores), *written.token_logprobs],
        LazyList(top_of, range(n + len(rest))),
        [*offsets, *written.text_offset],
    )
