"""Texts that become embeddings, and documents that are ranked."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from trioserve.config import Config
from trioserve.engine import EmbeddingEngine
from trioserve.errors import InvalidRequestError
from trioserve.server.context import RequestContext
from trioserve.server.embedding_results import Embeddings, Ranking, Shape
from trioserve.server.requests import Requests
from trioserve.server.stream import Stream
from trioserve.server.tokens import PromptLike, Tokenizer
from trioserve.types import Embedded, EmbeddingTask, TokenId

#: Embeddings with more numbers than this, all together, are normalized in a thread.
_MANY_NUMBERS = 65536


class Embedder:
    """Makes embeddings with an engine, or scores.

    Args:
        config: the norm of embeddings.
        engine: makes them.
        requests: where a request is opened.
        tokenizer: turns texts into tokens.
    """

    def __init__(
        self, config: Config, engine: EmbeddingEngine, requests: Requests, tokenizer: Tokenizer
    ) -> None:
        self._config = config
        self._engine = engine
        self._requests = requests
        self._tokenizer = tokenizer
        self.pooling = engine.pooling

    async def embed(
        self,
        inputs: Sequence[PromptLike],
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
        texts = [await self._tokenized(each) for each in inputs]
        tokens = map(self._tokens_of, texts)
        make = partial(self._task, tokens, context.client, priority, "input")
        task = await self._tokenizer.run(make, sum(map(len, texts)))
        with self._requests.open(task, context) as stream:
            result = await _embedded(stream)
            vectors = result.embeddings
            if pooled:
                apply = partial(shape.apply, vectors)
                is_large = len(inputs) * self._engine.width > _MANY_NUMBERS
                vectors = await self._tokenizer.run_in_thread(apply) if is_large else apply()
        return Embeddings(vectors, tuple(map(len, task.texts)), result.timings)

    async def rerank(
        self, query: str, documents: Sequence[str], priority: int, context: RequestContext
    ) -> Ranking:
        """See `Server.rerank`."""
        self._requests.admission.check_open()
        context.check_time()
        texts = (self._engine.pair(query, document) for document in documents)
        make = partial(self._task, texts, context.client, priority, "documents")
        n_chars = len(query) * len(documents) + sum(map(len, documents))
        task = await self._tokenizer.run(make, n_chars)
        with self._requests.open(task, context) as stream:
            result = await _embedded(stream)
        scores = tuple(float(matrix[0, 0]) for matrix in result.embeddings)
        return Ranking(scores, tuple(map(len, task.texts)), result.timings)

    async def _tokenized(self, text: PromptLike) -> str | tuple[TokenId, ...]:
        """Tokenize what is text only in part; a whole text is left to a thread."""
        return text if isinstance(text, str) else (await self._tokenizer.prompt_of(text)).tokens

    def _tokens_of(self, text: str | tuple[TokenId, ...]) -> tuple[TokenId, ...]:
        if isinstance(text, str):
            return self._engine.vocab.tokenize(text, add_special=True, parse_special=True)
        return text

    def _task(
        self, texts: Iterable[tuple[TokenId, ...]], client: str, priority: int, param: str
    ) -> EmbeddingTask:
        """Make a task. With many texts it takes a while."""
        weight = self._requests.weight_of(client)
        id_ = self._requests.new_id()
        return EmbeddingTask(id_, tuple(texts), client, weight, priority, param)


async def _embedded(stream: Stream) -> Embedded:
    """Wait for the one event of a task that makes embeddings."""
    async for event in stream:
        if isinstance(event, Embedded):
            return event
    raise AssertionError("a stream ends with its last event")
