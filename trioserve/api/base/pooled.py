"""Requests for vectors and scores of texts, in what all vendors have in common."""

from __future__ import annotations

import base64
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias, TypeVar

import attrs
from msgspec import UNSET, UnsetType

from trioserve.api.base import readers
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import (
    MismatchError,
    RequestBody,
    field,
    integer_in,
    json_type,
    one_of,
)
from trioserve.api.base.sse import LazyList
from trioserve.errors import InputTooLongError, InvalidRequestError
from trioserve.server.generation.embeddings import Array, Classification, Cut, Embeddings
from trioserve.server.model_server import ModelServer
from trioserve.server.prompts.media import MixedPrompt
from trioserve.server.prompts.text import AnyPrompt
from trioserve.types import Prompt

_Found = TypeVar("_Found", Embeddings, Classification)


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


@json_type({"anyOf": [{"type": "boolean"}, {"enum": ["NONE", "START", "END"]}]})
def _truncate(value: Any) -> str:
    """Read whether to cut a text, and where."""
    if isinstance(value, bool):
        return "END" if value else "NONE"
    return one_of("NONE", "START", "END")(value)


@json_type({"enum": ["left", "right"]})
def _side(value: Any) -> str:
    return one_of("left", "right")(value.lower() if isinstance(value, str) else value)


@json_type({"type": "integer", "minimum": -1})
def _limit(value: Any) -> int:
    """Read the most tokens of a text; -1: what the model takes, which is 0 here."""
    if value in (0, False):
        raise MismatchError("-1 or a positive integer")
    return max(0, integer_in(-1)(value))


@attrs.frozen(kw_only=True, slots=False)
class CutRequest(PooledRequest):
    """A request whose texts may be cut: in vLLM's words, and those of text-embeddings-inference."""

    truncate: str = field("truncate", "truncation", read=_truncate, default="NONE")
    truncate_prompt_tokens: int | None = field(read=_limit, default=None)
    truncation_side: str | None = field(
        "truncation_side", "truncation_direction", read=_side, default=None
    )

    @property
    def cut(self) -> Cut | None:
        """The cut of texts that are too long; None: they are refused."""
        if self.truncate_prompt_tokens is None and self.truncate == "NONE":
            return None
        side = self.truncation_side or ("left" if self.truncate == "START" else "right")
        return Cut(self.truncate_prompt_tokens or 0, keeps_end=side == "left")

    async def embed(
        self,
        server: ModelServer,
        texts: Sequence[AnyPrompt],
        embed: Callable[[Sequence[Any]], Awaitable[_Found]],
    ) -> _Found:
        """Call a function with texts, which are cut if the request says so."""
        cut = self.cut
        found = None
        if cut is not None:
            limit = cut.limit or None
            found = await embed_cut(server, texts, embed, limit=limit, keeps_end=cut.keeps_end)
        return await embed(texts) if found is None else found


def check_pools(server: ModelServer) -> None:
    """Check that a server makes a vector of each text.

    Raises:
        InvalidRequestError: it makes one of each token.
        NotSupportedError: it makes none.
    """
    server.model.check_embeds()
    if server.model.embedding_pooling == "none":
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
    texts: Sequence[AnyPrompt],
    embed: Callable[[Sequence[Any]], Awaitable[_Found]],
    *,
    limit: int | None = None,
    keeps_end: bool = False,
) -> _Found | None:
    """Make an embedding of each text, without what is beyond the limit; none without texts.

    Args:
        server: has the vocabulary.
        texts: what to embed; one with media is not cut.
        embed: makes the embeddings.
        limit: the most tokens of a text; the context and the batch have limits, too.
        keeps_end: cut a text at its beginning.
    """
    prompts: Sequence[AnyPrompt] = texts
    if limit is not None:
        prompts = [await _cut(server, each, limit, keeps_end=keeps_end) for each in texts]
    while prompts:
        try:
            return await embed(prompts)
        except InputTooLongError as error:
            # That of the context; there may be a smaller one of a batch.
            shortest, before = error.n_ctx, prompts
            prompts = [await _cut(server, each, shortest, keeps_end=keeps_end) for each in texts]
            if prompts == before:
                raise
    return None


async def _cut(server: ModelServer, text: AnyPrompt, limit: int, *, keeps_end: bool) -> AnyPrompt:
    """Cut a text that has too many tokens. What begins and ends every text stays there."""
    if isinstance(text, MixedPrompt | Prompt):
        return text
    tokens = await server.tokenize(text, param="input")
    if len(tokens) <= limit:
        return tokens
    around = await server.tokenize("")
    n_first, n_last = int(tokens[:1] == around[:1]), int(tokens[-1:] == around[-1:])
    end = len(tokens) - n_last
    if not keeps_end:
        return tokens[: limit - n_last] + tokens[end:]
    return tokens[:n_first] + tokens[end - max(0, limit - n_first - n_last) :]
