"""Cohere's routes: ``/v2/rerank`` and ``/v2/embed``."""

from __future__ import annotations

import builtins
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, ClassVar, Literal

import attrs
import msgspec
import numpy as np
from msgspec import UNSET, UnsetType

from trioserve.api.base import limits, readers, sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import (
    DATA,
    PART,
    STRING,
    MismatchError,
    Only,
    field,
    integer_in,
    json_type,
    list_schema,
    naming,
    objects,
    strings,
)
from trioserve.api.base.models import Models
from trioserve.api.base.pooled import (
    PooledRequest,
    Ranks,
    base64_of,
    check_pools,
    embed_cut,
    numbers_of,
    ranks_of,
)
from trioserve.api.base.readers import GivenPrompt
from trioserve.api.base.reply import Reply, long_json
from trioserve.api.base.routes import Routes, of_kind
from trioserve.api.openapi import gives, takes
from trioserve.errors import InputTooLongError, InvalidRequestError
from trioserve.server.generation.embeddings import Array, Embeddings
from trioserve.server.model_server import ModelServer
from trioserve.server.prompts.text import AnyPrompt
from trioserve.types import GenerationParams, place_of

routes = Routes(of_model=True)

#: The largest number of a priority in this API, where 0 goes first; and the lowest that tasks have.
_LAST, _LOWEST = 999, attrs.fields_dict(GenerationParams)["priority"].validator.bounds[0]  # type: ignore[union-attr]


@json_type({"type": "integer", "minimum": 0, "maximum": _LAST})
def _priority(value: Any) -> int:
    """Read a priority, and make it that of the queue, in which a higher one goes first."""
    return max(int(_LOWEST), -integer_in(0, _LAST)(value))


@attrs.frozen(kw_only=True, slots=False)
class _CohereRequest(PooledRequest):
    """The fields of both routes."""

    priority: int = field(read=_priority, default=0)


@json_type(list_schema(STRING, limits.MAX_INPUTS, minItems=1))
def _texts(value: Any) -> tuple[str, ...]:
    texts = strings(value)
    if not texts:
        raise MismatchError("a list of strings, and not empty")
    return texts


# -- ranking


@attrs.frozen(kw_only=True, slots=False)
class CohereRerankRequest(_CohereRequest):
    """``POST /v2/rerank``."""

    query: str
    documents: tuple[str, ...] = field(read=_texts)
    top_n: int | None = field(read=integer_in(1), default=None)
    max_tokens_per_doc: int = field(read=integer_in(1), default=4096)
    return_documents: bool = False


class _CohereVersion(Answer):
    version: str = "2"
    is_experimental: bool = False


class _CohereUnits(Answer, kw_only=True):
    search_units: int | UnsetType = UNSET
    input_tokens: int


class _CohereMeta(Answer):
    billed_units: _CohereUnits
    api_version: _CohereVersion = msgspec.field(default_factory=_CohereVersion)


class CohereRanking(Answer):
    """The documents that fit best."""

    id: str
    results: Ranks
    meta: _CohereMeta


@routes.post("/v2/rerank")
@of_kind(lambda server: server.model.check_ranks())
@takes(CohereRerankRequest)
@gives(CohereRanking)
async def rerank(request: CohereRerankRequest, caller: Caller, models: Models) -> Reply:
    """Score how well documents fit a query, from 0 to 1."""
    server = await models.use(request.model, caller)
    ranking = await server.rerank(
        request.query,
        request.documents,
        most=request.max_tokens_per_doc,
        **(await request.counted(server, caller)),
    )
    best, shown = ranking.best(request.top_n), request.documents if request.return_documents else ()
    ranks = ranks_of(best, ranking.shares, shown or None)
    units = _CohereUnits(search_units=1, input_tokens=sum(ranking.n_tokens))
    return long_json(
        lambda: CohereRanking(caller.request_id, ranks, _CohereMeta(units)),
        32 * len(best) + sum(map(len, shown)) // 32,
    )


# -- embeddings


@json_type(list_schema(DATA, limits.MAX_INPUTS, minItems=1))
def _images(value: Any) -> tuple[GivenPrompt, ...]:
    """Read images, as data URLs."""
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in _texts(value)]
    return tuple(readers.joined([part], f"images[{i}]") for i, part in enumerate(parts))


@json_type(list_schema(PART, limits.MAX_INPUTS, minItems=1))
def _mixed(value: Any) -> tuple[GivenPrompt, ...]:
    """Read inputs with parts of text and images."""
    given = objects(value)
    if not given or not all(isinstance(one.get("content"), list) for one in given):
        raise MismatchError("a list of objects with a list as 'content', and not empty")
    parts = [objects(one["content"]) for one in given]
    return tuple(readers.joined(each, f"inputs[{i}].content") for i, each in enumerate(parts))


#: Writers of an embedding, by its type. Those of `int8` and `uint8` need the ranges of the
#: numbers that a model makes, which a file does not have.
_TYPES: Mapping[str, Callable[[Array], Any]] = {
    "float": numbers_of,
    "base64": base64_of,
    "binary": lambda vector: (np.packbits(vector > 0).astype(np.int16) - 128).tolist(),
    "ubinary": lambda vector: np.packbits(vector > 0).tolist(),
}


@json_type({"type": "array", "items": {"enum": list(_TYPES)}, "minItems": 1, "maxItems": 8})
def _types(value: Any) -> tuple[str, ...]:
    types = tuple(dict.fromkeys(strings(value)))
    if not types or not set(types) <= _TYPES.keys():
        raise MismatchError(f"a list of {', '.join(_TYPES)}, and not empty")
    return types


#: The field of a request that has its inputs.
_INPUTS = ("texts", "images", "inputs")


@attrs.frozen(kw_only=True, slots=False)
class CohereEmbedRequest(_CohereRequest):
    """``POST /v2/embed``."""

    unsupported: ClassVar[Mapping[str, Only]] = {
        "input_type": Only(harmless="the client writes the prefixes that a model was trained with")
    }
    texts: tuple[str, ...] | None = field(read=_texts, default=None)
    images: tuple[GivenPrompt, ...] | None = field(read=_images, default=None)
    inputs: tuple[GivenPrompt, ...] | None = field(read=_mixed, default=None)
    input_type: (
        Literal["search_document", "search_query", "classification", "clustering", "image"] | None
    ) = None
    embedding_types: tuple[str, ...] = field(read=_types, default=("float",))
    output_dimension: int | None = field(read=integer_in(1), default=None)
    truncate: Literal["NONE", "START", "END"] = "END"
    max_tokens: int | None = field(read=integer_in(1), default=None)

    def __attrs_post_init__(self) -> None:
        given = [name for name in _INPUTS if getattr(self, name) is not None]
        if len(given) != 1:
            problem = (
                "is required, or 'images', or 'inputs'."
                if not given
                else (f"and {given[-1]!r} exclude each other.")
            )
            raise InvalidRequestError.at("texts" if not given else given[0], problem)
        if self.max_tokens is not None and self.texts is None:
            raise InvalidRequestError.at("max_tokens", "is for 'texts'.")

    @property
    def given(self) -> tuple[str, Sequence[GivenPrompt]]:
        """The field with the inputs, and these."""
        return next((name, value) for name in _INPUTS if (value := getattr(self, name)) is not None)


class _CohereVectors(Answer):
    float: Sequence[Sequence[builtins.float]] | UnsetType = UNSET
    base64: Sequence[str] | UnsetType = UNSET
    binary: Sequence[Sequence[int]] | UnsetType = UNSET
    ubinary: Sequence[Sequence[int]] | UnsetType = UNSET


class CohereEmbeddings(Answer, kw_only=True):
    """The embeddings of texts, or of other inputs."""

    id: str
    response_type: Literal["embeddings_by_type"] = "embeddings_by_type"
    embeddings: _CohereVectors
    texts: Sequence[str] | UnsetType = UNSET
    meta: _CohereMeta


@routes.post("/v2/embed")
@of_kind(check_pools)
@takes(CohereEmbedRequest)
@gives(CohereEmbeddings)
async def embed(request: CohereEmbedRequest, caller: Caller, models: Models) -> Reply:
    """Make a vector of each text, image, or mix of both; texts that are too long are cut."""
    done = await _embed(await models.use(request.model, caller), request, caller)
    types = request.embedding_types
    return long_json(
        lambda: CohereEmbeddings(
            id=caller.request_id,
            embeddings=_CohereVectors(
                **{name: sse.LazyList(_TYPES[name], done.vectors) for name in types}
            ),
            texts=UNSET if request.texts is None else request.texts,
            meta=_CohereMeta(_CohereUnits(input_tokens=sum(done.n_tokens))),
        ),
        sum(vector.size for vector in done.vectors) * len(types),
    )


async def _check_lengths(server: ModelServer, texts: Sequence[str], limit: int) -> None:
    for index, text in enumerate(texts):
        n_tokens = len(await server.tokenize(text, param="texts"))
        if n_tokens > limit:
            where = place_of(index, texts, "texts")
            raise InputTooLongError(
                n_tokens,
                limit,
                f"'{where}' is too large: a text of {n_tokens} tokens, where 'max_tokens' is "
                f"{limit}.",
                param=where,
            )


async def _embed(server: ModelServer, request: CohereEmbedRequest, caller: Caller) -> Embeddings:
    name, inputs = request.given
    counted = await request.counted(server, caller)

    def make(inputs: Sequence[AnyPrompt]) -> Awaitable[Embeddings]:
        return server.embed(inputs, dimensions=request.output_dimension, **counted)

    with naming({"input": name, "dimensions": "output_dimension"}):
        if request.texts is None or request.truncate == "NONE":
            if request.texts is not None and request.max_tokens is not None:
                await _check_lengths(server, request.texts, request.max_tokens)
            return await make(inputs)
        done = await embed_cut(
            server,
            request.texts,
            make,
            limit=request.max_tokens,
            keeps_end=request.truncate == "START",
        )
    assert done is not None
    return done
