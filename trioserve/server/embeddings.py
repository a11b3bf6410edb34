"""`Vectors`: texts that become vectors, and documents that are ranked."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import partial

import trio

from trioserve.engine import EmbeddingEngine
from trioserve.errors import InvalidRequestError, NotSupportedError
from trioserve.server.core import Core
from trioserve.server.embedding_results import Embeddings, Ranking, Shape
from trioserve.server.stream import Stream
from trioserve.types import CancelReason, Embedded, EmbeddingTask, TokenId

#: Vectors with more numbers than this, all together, are normalized in a thread.
_MANY_NUMBERS = 65536


class Vectors(Core):
    """Makes vectors of texts."""

    def check_embeds(self) -> EmbeddingEngine:
        """Refuse work that makes vectors where the server makes text, or ranks.

        Raises:
            NotSupportedError: it was not started with `embeddings`, or its model ranks.
        """
        if not isinstance(self._loop, EmbeddingEngine):
            raise NotSupportedError(
                "This server does not support embeddings. Start it with `--embeddings`"
            )
        if self._loop.pooling == "rank":
            raise NotSupportedError("This server ranks documents, and has no vectors for them.")
        return self._loop

    def check_ranks(self) -> EmbeddingEngine:
        """Refuse documents to be ranked where the model does not do that.

        Raises:
            NotSupportedError: the server was not started with `reranking`.
        """
        if not isinstance(self._loop, EmbeddingEngine) or self._loop.pooling != "rank":
            raise NotSupportedError(
                "This server does not support reranking. Start it with `--reranking`"
            )
        return self._loop

    async def embed(
        self,
        inputs: str | Sequence[str | Sequence[TokenId]],
        *,
        dimensions: int | None = None,
        normalize: int | None = None,
        priority: int = 0,
        on_cancel: CancelReason = CancelReason.CALLER,
        timeout: float | None = None,
        client: str = "",
    ) -> Embeddings:
        """Make a vector of each text. Cancelling it frees the engine within a tick.

        Args:
            inputs: a text, or any number of texts and of lists of token ids.
            dimensions: keep so many numbers of each vector. Good for models that were trained
                so that the first ones say most.
            normalize: the norm that vectors get, as `Config.embd_normalize`; that is the default.
                With pooling "none" there is no norm.
            priority: -100 to 100; higher goes first in the queue.
            on_cancel: what the log gives as the reason when the call is cancelled.
            timeout: seconds from now after which the request is cancelled, wherever it is.
            client: whose request it is. In the queue, clients take turns.

        Raises:
            InvalidRequestError: a text has no tokens or too many, or an option is out of range.
            NotSupportedError: the server was not started with `embeddings`, or its model ranks.
            QueueFullError: too many requests wait already.
            DeadlineExceededError: `timeout` has passed.
            ServerClosingError: the server drains, or is closed.
        """
        self._check_open()
        engine = self.check_embeds()
        pooled = engine.pooling != "none"
        if not pooled and not (normalize in (None, -1) and dimensions is None):
            raise InvalidRequestError(
                "Vectors of single tokens are neither cut nor normalized.",
                param="dimensions" if dimensions is not None else "embd_normalize",
            )
        shape = Shape(
            normalize=self.config.embd_normalize if normalize is None else normalize,
            dimensions=dimensions,
        )
        shape.check(engine.width)
        deadline = math.inf if timeout is None else trio.current_time() + timeout

        def tokens_of(text: str | Sequence[TokenId]) -> tuple[TokenId, ...]:
            if isinstance(text, str):
                return self.vocab.tokenize(text, add_special=True, parse_special=True)
            return tuple(text)

        inputs = [inputs] if isinstance(inputs, str) else inputs
        make = partial(self._embedding_task, map(tokens_of, inputs), client, priority, "input")
        task = await self._work(make, sum(map(len, inputs)))
        with self._request(task, on_cancel, deadline) as stream:
            done = await _embedded(stream)
            vectors = done.embeddings
            if pooled:
                size = len(inputs) * engine.width
                apply = partial(shape.apply, vectors)
                vectors = (
                    await trio.to_thread.run_sync(apply, limiter=self._worker)
                    if size > _MANY_NUMBERS
                    else apply()
                )
        return Embeddings(vectors, tuple(map(len, task.texts)), done.timings)

    async def rerank(
        self,
        query: str,
        documents: str | Sequence[str],
        *,
        priority: int = 0,
        on_cancel: CancelReason = CancelReason.CALLER,
        timeout: float | None = None,
        client: str = "",
    ) -> Ranking:
        """Score how well each document fits a query; see `Ranking.best`. Arguments as in `embed`.

        Raises:
            InvalidRequestError: there are no documents, or one is too long.
            NotSupportedError: the server was not started with `reranking`.
            QueueFullError: too many requests wait already.
            DeadlineExceededError: `timeout` has passed.
            ServerClosingError: the server drains, or is closed.
        """
        self._check_open()
        pair = self.check_ranks().pair
        deadline = math.inf if timeout is None else trio.current_time() + timeout
        documents = [documents] if isinstance(documents, str) else documents
        texts = (pair(query, document) for document in documents)
        make = partial(self._embedding_task, texts, client, priority, "documents")
        n_chars = len(query) * len(documents) + sum(map(len, documents))
        task = await self._work(make, n_chars)
        with self._request(task, on_cancel, deadline) as stream:
            done = await _embedded(stream)
        scores = tuple(float(matrix[0, 0]) for matrix in done.embeddings)
        return Ranking(scores, tuple(map(len, task.texts)), done.timings)

    def _embedding_task(
        self, texts: Iterable[tuple[TokenId, ...]], client: str, priority: int, param: str
    ) -> EmbeddingTask:
        """Make a task. With many texts it takes a while."""
        weight = self._weights.get(client, 1.0)
        return EmbeddingTask(next(self._ids), tuple(texts), client, weight, priority, param)


async def _embedded(stream: Stream) -> Embedded:
    """Wait for the one event of a task that makes vectors."""
    async for event in stream:
        if isinstance(event, Embedded):
            return event
    raise AssertionError("a stream ends with its last event")
