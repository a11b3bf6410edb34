"""Texts that become embeddings, and documents that are ranked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from trioserve.config import Config
from trioserve.engine import EmbeddingEngine
from trioserve.errors import AbandonedError, InputTooLongError, InvalidRequestError
from trioserve.server.context import RequestContext
from trioserve.server.embedding_results import Embeddings, Ranking, Shape
from trioserve.server.media_prompts import AnyPrompt, MediaPrompts, MixedPrompt
from trioserve.server.memory import Hold
from trioserve.server.requests import Requests
from trioserve.server.stream import Stream
from trioserve.server.tokens import PromptLike, tokens_of
from trioserve.server.workers import Stop, Workers
from trioserve.types import Embedded, EmbeddingTask, Prompt, TokenId

#: Embeddings with more numbers than this, all together, are normalized in a thread.
_MANY_NUMBERS = 65536

#: How many times the text of its tokens a text may be as long, because vocabularies drop blanks.
_DROPPED = 4


class Embedder:
    """Makes embeddings with an engine, or scores.

    Args:
        config: the norm of embeddings.
        engine: makes them.
        requests: where a request is opened.
        workers: turn texts into tokens.
        media: makes texts with media in them.
    """

    def __init__(
        self,
        config: Config,
        engine: EmbeddingEngine,
        requests: Requests,
        workers: Workers,
        media: MediaPrompts,
    ) -> None:
        self._config = config
        self._engine = engine
        self._requests = requests
        self._workers = workers
        self._media = media
        self.pooling = engine.pooling

    async def embed(
        self,
        inputs: Sequence[AnyPrompt],
        dimensions: int | None,
        normalize: int | None,
        priority: int,
        context: RequestContext,
    ) -> Embeddings:
        """See `Server.embed`."""
        self._requests.admission.check_open()
        context.check_time()
        pooled = self.pooling != "none"
        if not pooled and not (normalize in (None, -1) and dimensions is None):
            raise InvalidRequestError(
                "Embeddings of single tokens are neither cut nor normalized.",
                param="dimensions" if dimensions is not None else "embd_normalize",
            )
        default = self._config.embd_normalize
        shape = Shape(normalize=default if normalize is None else normalize, dimensions=dimensions)
        shape.check(self._engine.width)
        with self._media.hold(context.client) as hold:
            texts = await self._with_media(inputs, context, hold)
            self._check_lengths(texts, "input")
            task = await self._workers.run(
                lambda stop: self._task(
                    (self._text_of(each, stop) for each in texts), context, priority, "input"
                ),
                sum(map(len, texts)) + 32 * len(texts),
            )
            with self._requests.open(task, context, "embeddings") as stream:
                result = await _embedded(stream)
        vectors = result.embeddings
        if pooled:
            apply = partial(shape.apply, vectors)
            is_large = len(inputs) * self._engine.width > _MANY_NUMBERS
            vectors = await self._workers.run_in_thread(lambda _: apply()) if is_large else apply()
        return Embeddings(vectors, tuple(map(len, task.texts)), result.timings)

    async def _with_media(
        self, inputs: Sequence[AnyPrompt], context: RequestContext, hold: Hold
    ) -> list[PromptLike]:
        """Make prompts of the texts that have media in them, one after another."""
        if any(isinstance(each, MixedPrompt) for each in inputs):
            self._requests.admission.check(0, context.client)  # not to work for nothing
        return [
            await self._media.prompt_of(
                each.parts, hold, add_special=True, deadline=context.deadline
            )
            if isinstance(each, MixedPrompt)
            else each
            for each in inputs
        ]

    async def rerank(
        self, query: str, documents: Sequence[str], priority: int, context: RequestContext
    ) -> Ranking:
        """See `Server.rerank`."""
        self._requests.admission.check_open()
        context.check_time()
        self._check_lengths([query], "query")
        self._check_lengths(documents, "documents")
        task = await self._workers.run(
            lambda stop: self._task(
                (self._pair(query, document, stop) for document in documents),
                context,
                priority,
                "documents",
            ),
            (len(query) + 32) * len(documents) + sum(map(len, documents)),
        )
        with self._requests.open(task, context, "rerank") as stream:
            result = await _embedded(stream)
        scores = tuple(float(matrix[0, 0]) for matrix in result.embeddings)
        return Ranking(scores, tuple(map(len, task.texts)), result.timings)

    def _check_lengths(self, inputs: Sequence[PromptLike], param: str) -> None:
        """Refuse texts that are far too long before they are tokenized.

        A token stands for a limited number of characters, but some vocabularies drop blanks.
        """
        limit, size = self._engine.n_ctx_seq, self._engine.vocab.max_token_bytes
        for text in inputs:
            n_tokens = len(text) // (_DROPPED * size) if isinstance(text, str) else len(text)
            if n_tokens > limit:
                raise InputTooLongError(
                    n_tokens,
                    limit,
                    f"A text of at least {n_tokens} tokens is too large: the context of the model "
                    f"holds {limit}.",
                    param=param,
                )

    def _text_of(self, text: PromptLike, stop: Stop) -> Prompt:
        if isinstance(text, Prompt):
            return text
        parts = (text,) if isinstance(text, str) else text
        return tokens_of(self._engine.vocab, parts, stop)

    def _pair(self, query: str, document: str, stop: Stop) -> tuple[TokenId, ...]:
        if stop():
            raise AbandonedError("Nobody waits for this ranking any longer.")
        return self._engine.pair(query, document)

    def _task(
        self,
        texts: Iterable[Prompt | tuple[TokenId, ...]],
        context: RequestContext,
        priority: int,
        param: str,
    ) -> EmbeddingTask:
        """Make a task. With many texts it takes a while."""
        weight = self._requests.weight_of(context.client)
        id_ = self._requests.new_id()
        return EmbeddingTask(id_, texts, context.client, weight, priority, param)


async def _embedded(stream: Stream) -> Embedded:
    """Wait for the one event of a task that makes embeddings."""
    async for event in stream:
        if isinstance(event, Embedded):
            return event
    raise AssertionError("a stream ends with its last event")
