"""Requests for vectors and scores of texts, in what all vendors have in common."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import attrs
from msgspec import UNSET, UnsetType

from trioserve.api.base import readers
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import RequestBody, field
from trioserve.api.base.sse import LazyList
from trioserve.errors import InputTooLongError, InvalidRequestError
from trioserve.server.generation.embeddings import Array, Embeddings
from trioserve.server.model_server import ModelServer
from trioserve.server.prompts.text import PromptLike
from trioserve.types import TokenId


@attrs.frozen(kw_only=True, slots=False)
class PooledRequest(RequestBody):
    """The fields of every request for vectors or scores."""

    model: str | None = field(read=readers.model_name, default=None)
    priority: int = 0
    timeout: float | None = field(read=readers.seconds, default=None)
    keep_alive: float | None = field(read=readers.keep_alive, default=None)

    async def counted(self, server: ModelServer, caller: Caller) -> dict[str, Any]:
        """Count the request for the rate limits; gives what the server takes with its texts."""
        context = await caller.counted(server, self.timeout, self.keep_alive)
        return {"priority": self.priority, "context": context}


def check_pools(server: ModelServer) -> None:
    """Check that a server makes a vector of each text.

    Raises:
        InvalidRequestError: it makes one of each token.
        NotSupportedError: it makes none.
    """
    server.model.check_embeds()
    if server.model.pooling == "none":
        raise InvalidRequestError(
            "This server makes a vector of each token, because its pooling is 'none', and this "
            "route has one for each text. POST /embeddings gives them."
        )


# -- vectors


def numbers_of(vector: Array) -> list[float]:
    """Write a vector as numbers."""
    numbers: list[float] = vector.tolist()
    return numbers


def base64_of(vector: Array) -> str:
    """Write the floats of a vector, the lowest byte first, in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()


# -- ranks


class _RankedText(Answer):
    text: str


class _Ranked(Answer):
    index: int
    relevance_score: float
    document: _RankedText | UnsetType = UNSET


#: The places of documents, the best first, with their scores.
Ranks: TypeAlias = Sequence[_Ranked]


def ranks_of(
    places: Sequence[int], scores: Sequence[float], documents: Sequence[str] | None
) -> Ranks:
    """Write the places of documents with their scores, and with their texts if there are any."""

    def write(place: int) -> _Ranked:
        text = UNSET if documents is None else _RankedText(documents[place])
        return _Ranked(place, scores[place], text)

    return LazyList(write, places)


# -- texts that are cut: what Ollama and Cohere do unless asked not to


async def embed_cut(
    server: ModelServer,
    texts: Sequence[str],
    embed: Callable[[Sequence[PromptLike]], Awaitable[Embeddings]],
    *,
    limit: int | None = None,
    keeps_end: bool = False,
) -> Embeddings | None:
    """Make an embedding of each text, without what is beyond the limit; none without texts.

    Args:
        server: has the vocabulary.
        texts: what to embed.
        embed: makes the embeddings.
        limit: the most tokens of a text; the context and the batch have limits, too.
        keeps_end: cut a text at its beginning.
    """
    prompts: Sequence[PromptLike] = texts
    if limit is not None:
        prompts = [await _cut(server, each, limit, keeps_end=keeps_end) for each in texts]
    while prompts:
        try:
            return await embed(prompts)
        except InputTooLongError as error:
            # That of the context; there may be a smaller one of a batch.
            shortest = error.n_ctx
            prompts = [await _cut(server, each, shortest, keeps_end=keeps_end) for each in texts]
    return None


async def _cut(
    server: ModelServer, text: str, limit: int, *, keeps_end: bool
) -> tuple[TokenId, ...]:
    """Cut a text that has too many tokens. What begins and ends every text stays there."""
    tokens = await server.tokenize(text, param="input")
    if len(tokens) <= limit:
        return tokens
    around = await server.tokenize("")
    n_first, n_last = int(tokens[:1] == around[:1]), int(tokens[-1:] == around[-1:])
    end = len(tokens) - n_last
    if not keeps_end:
        return tokens[: limit - n_last] + tokens[end:]
    return tokens[:n_first] + tokens[end - max(0, limit - n_first - n_last) :]
