"""Embeddings in OpenAI's form and in llama-server's own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import attrs
import numpy as np
from msgspec import UNSET, UnsetType

from trioserve.api.base import limits, readers, sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import (
    PART,
    MismatchError,
    Only,
    field,
    integer,
    integer_in,
    json_type,
    list_schema,
    objects,
)
from trioserve.api.base.models import Models
from trioserve.api.base.pooled import CutRequest, base64_of, check_pools, numbers_of
from trioserve.api.base.readers import GivenPrompt
from trioserve.api.base.reply import Json, Reply, long_json
from trioserve.api.base.routes import Routes, of_kind
from trioserve.api.base.usage import PromptUsage
from trioserve.api.openapi import gives, takes
from trioserve.errors import InvalidRequestError
from trioserve.server.generation.embeddings import Array, Embeddings
from trioserve.server.model_server import ModelServer
from trioserve.server.prompts.text import AnyPrompt

routes = Routes(of_model=True)

_T = TypeVar("_T")

_EXPECTED = (
    "a string, a list of token ids, a list of ids and strings, an object with a list as "
    "'content', or a list of these"
)


_TEXT = {**PART, **readers.RAW, "type": ["string", "array", "object"]}


def _inputs(name: str) -> Callable[[Any], tuple[GivenPrompt, ...]]:
    """Make a reader of one text or a list of them, in the field `name`."""

    @json_type(
        {
            "anyOf": [_TEXT, list_schema(_TEXT, limits.MAX_INPUTS)],
            "description": f"A text, or a list of at most {limits.MAX_INPUTS} of them. A text may "
            "be given as token ids, as an object with a `prompt_string` and `multimodal_data`, or "
            "as one with a list of parts as `content`, of the types that chats have.",
        }
    )
    def read(value: Any) -> tuple[GivenPrompt, ...]:
        return readers.one_or_many(value, _input, name, (limits.MAX_INPUTS, "texts"), _EXPECTED)

    return read


def _input(value: Any, path: str) -> GivenPrompt:
    if isinstance(value, dict) and isinstance(value.get("content"), list):
        return readers.joined(objects(value["content"]), f"{path}.content")
    if isinstance(value, dict) and isinstance(value.get("prompt_string"), str):
        return readers.any_prompt(value, path)
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(type(each) in (int, str) for each in value):
        return tuple(value)
    raise MismatchError(_EXPECTED)


@json_type({"type": "integer", "minimum": -1})
def _norm(value: Any) -> int:
    if not -1 <= integer(value) < 2**31:
        raise MismatchError("-1, 0 or a positive integer")
    return integer(value)


#: Fields of vLLM that would change the embeddings.
_UNSUPPORTED: Mapping[str, Only] = {
    "add_special_tokens": Only(True),
    "embed_dtype": Only("float32"),
    "endianness": Only("native", "little"),
    "normalize": Only(True),
    "use_activation": Only(True),
}


@attrs.frozen(kw_only=True)
class EmbeddingsRequest(CutRequest):
    """``POST /v1/embeddings`` and ``/embeddings``. `content` asks for llama-server's own form."""

    unsupported = _UNSUPPORTED
    input: tuple[GivenPrompt, ...] | None = field(read=_inputs("input"), default=None)
    content: tuple[GivenPrompt, ...] | None = field(read=_inputs("content"), default=None)
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = field(read=integer_in(1, None), default=None)
    embd_normalize: int | None = field(read=_norm, default=None)


class _Embedding(Answer):
    embedding: Sequence[float] | str
    index: int
    object: Literal["embedding"] = "embedding"
    encoding_format: str | UnsetType = UNSET


class EmbeddingList(Answer, kw_only=True):
    """The embeddings of texts, in OpenAI's form."""

    model: str
    object: Literal["list"] = "list"
    usage: PromptUsage
    data: Sequence[_Embedding]


class Matrix(Answer):
    """The embedding of a text in llama-server's form: a row, or a row for each token."""

    index: int
    embedding: Sequence[Sequence[float]]


@routes.post("/v1/embeddings")
@of_kind(check_pools)
@takes(EmbeddingsRequest)
@gives(EmbeddingList | list[Matrix])
async def openai(request: EmbeddingsRequest, caller: Caller, models: Models) -> Reply:
    """Make a vector of each text."""
    if request.input is None:
        return await own(request, caller, models)
    server = await models.use(request.model, caller)
    done = await _embed(server, request, caller)
    n_tokens = sum(done.n_tokens)

    def write(index: int, vector: Array) -> _Embedding:
        if request.encoding_format == "base64":
            return _Embedding(base64_of(vector), index, encoding_format="base64")
        return _Embedding(numbers_of(vector), index)

    written = EmbeddingList(
        model=server.model.info.name,
        usage=PromptUsage(n_tokens, n_tokens),
        data=_written(write, done),
    )
    return _reply(written, done)


@routes.post("/embedding", "/embeddings")
@of_kind(lambda server: server.model.check_embeds())
@takes(EmbeddingsRequest)
@gives(list[Matrix])
async def own(request: EmbeddingsRequest, caller: Caller, models: Models) -> Reply:
    """Make a vector of each text, or of each token, in llama-server's own form."""
    if request.encoding_format == "base64":
        raise InvalidRequestError.at(
            "encoding_format", "base64 is for OpenAI's form, with 'input'."
        )
    done = await _embed(await models.use(request.model, caller), request, caller)
    return _reply(_written(_as_matrix, done), done)


async def _embed(server: ModelServer, request: EmbeddingsRequest, caller: Caller) -> Embeddings:
    prompts = request.content if request.input is None else request.input
    if prompts is None:
        raise InvalidRequestError.at("input", "or 'content' must be provided.")
    counted = await request.counted(server, caller)

    def embed(texts: Sequence[AnyPrompt]) -> Awaitable[Embeddings]:
        size, norm = request.dimensions, request.embd_normalize
        return server.embed(texts, dimensions=size, normalize=norm, **counted)

    return await request.embed(server, prompts, embed)


# -- the answer


def _as_matrix(index: int, vectors: Array) -> Matrix:
    return Matrix(index, sse.LazyList(np.ndarray.tolist, list(np.atleast_2d(vectors))))


def _written(write: Callable[[int, Array], Any], done: Embeddings) -> sse.LazyList:
    return sse.LazyList(lambda index: write(index, done.vectors[index]), range(len(done.vectors)))


def _reply(written: Any, done: Embeddings) -> Json:
    return long_json(lambda: written, sum(vector.size for vector in done.vectors))
