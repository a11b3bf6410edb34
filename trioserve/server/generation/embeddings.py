"""Embeddings of texts, and rankings of documents."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import repeat

import attrs
import numpy as np
from numpy.typing import NDArray

from trioserve.concurrency import check_cancelled
from trioserve.engine import EmbeddingEngine
from trioserve.errors import InputTooLongError, InvalidRequestError
from trioserve.fair_limiter import Workers
from trioserve.server.context import RequestContext
from trioserve.server.generation.requests import Requests, cache_owner
from trioserve.server.limits.memory import MemoryReservation
from trioserve.server.prompts.media import MediaPrompts, MixedPrompt
from trioserve.server.prompts.text import AnyPrompt, PromptLike, tokens_of
from trioserve.types import Embedded, EmbeddingTask, Prompt, Timings, TokenId, place_of

Array = NDArray[np.float32]

#: With norm 0, a vector is scaled so that its largest component is this.
_LARGEST = 32760.0


@attrs.frozen(eq=False)
class Embeddings:
    """The embeddings of some texts, in their order.

    An embedding has shape (width,); with pooling "none" it is a matrix (tokens, width).
    """

    vectors: tuple[Array, ...]
    n_tokens: tuple[int, ...]
    timings: Timings


@attrs.frozen
class Cut:
    """The way to cut a text that is too long."""

    #: The most tokens of it; 0: what the model can take.
    limit: int = 0
    #: True if it is cut at its beginning.
    keeps_end: bool = False


@attrs.frozen
class Ranking:
    """The scores of some documents, in their order. Higher ones fit the query better."""

    scores: tuple[float, ...]
    n_tokens: tuple[int, ...]
    timings: Timings
    #: True if the model itself gives scores from 0 to 1.
    are_probs: bool = False

    @property
    def shares(self) -> tuple[float, ...]:
        """The scores as numbers from 0 to 1, by the logistic function if the model needs it."""
        if self.are_probs:
            return self.scores
        return tuple(0.5 * (1 + math.tanh(score / 2)) for score in self.scores)

    def best(self, n: int | None = None) -> tuple[int, ...]:
        """The indices of the `n` best documents, or of all, the best one first."""
        order = sorted(range(len(self.scores)), key=lambda index: -self.scores[index])
        return tuple(order[:n])


@attrs.frozen(eq=False)
class Classification:
    """The scores that some texts have for each class, in their order.

    With `are_probs`, those of a text add up to 1.
    """

    scores: tuple[Array, ...]  # of each text, shape (classes,)
    #: The names of the classes; empty if the model has no names for them.
    labels: tuple[str, ...]
    n_tokens: tuple[int, ...]
    timings: Timings
    are_probs: bool = False

    @property
    def probs(self) -> tuple[Array, ...]:
        """The probabilities of the classes: softmax, or of one class the logistic function."""
        if self.are_probs:
            return self.scores
        return tuple(map(_probs, self.scores))


def _probs(scores: Array) -> Array:
    if len(scores) == 1:
        # As tanh, which does not overflow.
        return np.asarray(0.5 * (1 + np.tanh(scores / 2)), np.float32)
    powers = np.exp(scores - scores.max())
    return np.asarray(powers / powers.sum(), np.float32)


def _check_shape(normalize: int, dimensions: int | None, width: int) -> None:
    """Check how embeddings of a width are cut and normalized. Raises InvalidRequestError."""
    if not -1 <= normalize < 2**31:
        raise InvalidRequestError.at("embd_normalize", "must be -1, 0 or a positive number.")
    if dimensions is not None and dimensions < 1:
        raise InvalidRequestError.at("dimensions", "must be at least 1.")
    if dimensions is not None and dimensions > width:
        raise InvalidRequestError.at(
            "dimensions", f"is {dimensions}, and the model's embeddings have {width}."
        )


def _shaped(pooled: Sequence[Array], normalize: int, dimensions: int | None) -> tuple[Array, ...]:
    """Cut and normalize embeddings, each of shape (1, width). Returns each of shape (n,)."""
    matrix = np.concatenate(pooled)[:, :dimensions]
    sizes = _norms(matrix.astype(np.float64), normalize)
    # As in llama.cpp: divided in double, rounded, then multiplied.
    factors = np.divide(1.0, sizes, out=np.zeros_like(sizes), where=sizes > 0)
    return tuple(matrix * factors.astype(np.float32)[:, np.newaxis])


def _norms(matrix: NDArray[np.float64], norm: int) -> NDArray[np.float64]:
    """The norm of each row; -1: 1; 0: as the largest component; 1: taxicab; p: p-norm."""
    if norm == -1:
        return np.ones(len(matrix))
    if norm == 0:
        return np.asarray(np.abs(matrix).max(axis=1) / _LARGEST)
    return np.asarray(np.linalg.norm(matrix, ord=norm, axis=1))


#: Components that can be normalized in the time that tokenizing one character takes.
_NUMBERS_A_CHARACTER = 16

#: A text may be this many times as long as the text of its tokens: some vocabularies drop blanks.
_DROPPED = 4


@attrs.define(eq=False, slots=False)
class Embedder:
    """Computes embeddings and scores with an engine."""

    _engine: EmbeddingEngine  # runs the model
    _requests: Requests  # opens requests
    _workers: Workers  # threads that tokenize
    _media: MediaPrompts  # makes prompts of texts with media

    async def embed(
        self,
        inputs: str | Sequence[AnyPrompt],
        dimensions: int | None,
        normalize: int | None,
        priority: int,
        context: RequestContext,
    ) -> Embeddings:
        """See `Server.embed`."""
        inputs = [inputs] if isinstance(inputs, str) else inputs
        pooled = self._engine.pooling != "none"
        if not pooled and not (normalize in (None, -1) and dimensions is None):
            raise InvalidRequestError(
                "Embeddings of single tokens are neither cut nor normalized.",
                param="dimensions" if dimensions is not None else "embd_normalize",
            )
        if normalize is None:
            normalize = self._requests.resources.config.embd_normalize
        _check_shape(normalize, dimensions, self._engine.width)
        with self._requests.resources.memory.hold(context.client) as hold:
            with context.preparing():
                texts = await self._with_media(inputs, context, hold)
                task = await self._task_of(texts, priority, context)
            result = await self._result(task, context, "embeddings")
        vectors = result.embeddings
        if pooled:
            cost = len(vectors) * self._engine.width // _NUMBERS_A_CHARACTER
            vectors = await self._workers.offload(
                partial(_shaped, vectors, normalize, dimensions), cost
            )
        return Embeddings(vectors, tuple(map(len, task.texts)), result.timings)

    async def _with_media(
        self, inputs: Sequence[AnyPrompt], context: RequestContext, hold: MemoryReservation
    ) -> list[PromptLike]:
        """Make prompts of the texts that contain media, one after another."""
        if any(isinstance(each, MixedPrompt) for each in inputs):
            self._requests.check_room(context)  # reject before loading media
        return [
            await self._media.prompt_of(
                each.parts,
                hold,
                scope=cache_owner(self._requests.resources.config, context.client),
                add_special=True,
            )
            if isinstance(each, MixedPrompt)
            else each
            for each in inputs
        ]

    async def rerank(
        self,
        query: str | Sequence[str],
        documents: str | Sequence[str],
        cut: tuple[int | None, Cut | None],
        priority: int,
        context: RequestContext,
    ) -> Ranking:
        """See `Server.rerank`. With several queries, there is one for each document."""
        documents = [documents] if isinstance(documents, str) else documents
        most, whole = cut
        if most is not None:
            documents = [self._beginning(document, most) for document in documents]
        if whole is not None:
            whole = attrs.evolve(whole, limit=min(whole.limit or sys.maxsize, self._engine.longest))
            documents = [
                self._beginning(document, whole.limit, keeps_end=whole.keeps_end)
                for document in documents
            ]
        queries = [query] if isinstance(query, str) else query
        with context.preparing():
            self._check_lengths(queries, "query")
            self._check_lengths(documents, "documents")
            if len(queries) == 1:
                queries = [*queries] * len(documents)
            pairs = map(self._pair, queries, documents, repeat(most), repeat(whole))
            task = await self._workers.offload(
                partial(self._task, pairs, context, priority, "documents"),
                sum(map(len, queries)) + 32 * len(documents) + sum(map(len, documents)),
            )
        result = await self._result(task, context, "rerank")
        scores = tuple(float(matrix[0, 0]) for matrix in result.embeddings)
        n_tokens = tuple(map(len, task.texts))
        return Ranking(scores, n_tokens, result.timings, self._engine.scores_are_probs)

    async def classify(
        self, inputs: str | Sequence[PromptLike], priority: int, context: RequestContext
    ) -> Classification:
        """See `Server.classify`."""
        texts = [inputs] if isinstance(inputs, str) else inputs
        with context.preparing():
            task = await self._task_of(texts, priority, context)
        result = await self._result(task, context, "classify")
        return Classification(
            tuple(matrix[0] for matrix in result.embeddings),
            tuple(self._engine.labels),
            tuple(map(len, task.texts)),
            result.timings,
            self._engine.scores_are_probs,
        )

    def _check_lengths(self, inputs: Sequence[PromptLike], param: str) -> None:
        """Reject texts that are far too long before they are tokenized.

        A token has a limited number of characters, but some vocabularies drop blanks.
        """
        limit = self._engine.n_ctx_seq
        for index, text in enumerate(inputs):
            n_tokens = len(text)
            if n_tokens > limit and isinstance(text, str):
                n_tokens //= _DROPPED * self._engine.vocab.max_token_bytes
            if n_tokens > limit:
                where = place_of(index, inputs, param)
                raise InputTooLongError(
                    n_tokens,
                    limit,
                    f"'{where}' is too large: a text of at least {n_tokens} tokens, where the "
                    f"context of the model holds {limit}.",
                    param=where,
                )

    def _text_of(self, text: PromptLike) -> Prompt:
        check_cancelled()
        if isinstance(text, Prompt):
            return text
        parts = (text,) if isinstance(text, str) else text
        return tokens_of(self._engine.vocab, parts)

    def _beginning(self, text: str, n_tokens: int, *, keeps_end: bool = False) -> str:
        """Leave out what is certainly beyond some tokens, so that it is not tokenized."""
        n_chars = n_tokens * _DROPPED * self._engine.vocab.max_token_bytes
        return text[-n_chars:] if keeps_end else text[:n_chars]

    def _pair(
        self, query: str, document: str, most: int | None, cut: Cut | None
    ) -> tuple[TokenId, ...]:
        check_cancelled()
        pair, vocab = self._engine.pair(query, document, most), self._engine.vocab
        if cut is None or len(pair) <= cut.limit:
            return pair
        tokens = vocab.tokenize(document, add_special=False, parse_special=False)[:most]
        n_left = len(tokens)
        while len(pair) > cut.limit and n_left > 0:
            n_left = max(0, n_left - (len(pair) - cut.limit))
            kept = tokens[len(tokens) - n_left :] if cut.keeps_end else tokens[:n_left]
            pair = self._engine.pair(query, vocab.detokenize(kept).decode(errors="ignore"))
        if len(pair) > cut.limit:
            raise InputTooLongError(
                len(pair),
                cut.limit,
                f"'query' is too large: {len(pair)} tokens without a document, where {cut.limit} "
                "are allowed.",
                param="query",
            )
        return pair

    def _task(
        self,
        texts: Iterable[Prompt | tuple[TokenId, ...]],
        context: RequestContext,
        priority: int,
        param: str,
    ) -> EmbeddingTask:
        """Make a task. With many texts it is slow."""
        weight = self._requests.resources.weight_of(context.client)
        id_ = next(self._requests.resources.task_ids)
        return EmbeddingTask(id_, texts, context.client, weight, priority, param)

    async def _task_of(
        self, texts: Sequence[PromptLike], priority: int, context: RequestContext
    ) -> EmbeddingTask:
        self._check_lengths(texts, "input")
        make = partial(self._task, map(self._text_of, texts), context, priority, "input")
        return await self._workers.offload(make, sum(map(len, texts)) + 32 * len(texts))

    async def _result(
        self, task: EmbeddingTask, context: RequestContext, operation: str
    ) -> Embedded:
        """Run a task, and wait for its only event."""
        with self._requests.open(task, context, operation) as stream:
            event = await stream.next_event()
        assert isinstance(event, Embedded)
        return event
