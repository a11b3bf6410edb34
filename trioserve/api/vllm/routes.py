"""vLLM's routes: ``/v1/score``, ``/v1/classify`` and ``/tokenizer_info``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeVar

import attrs
import numpy as np

from trioserve.api.base import limits, readers, sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import (
    STRING,
    MismatchError,
    Only,
    field,
    json_type,
    list_schema,
    naming,
)
from trioserve.api.base.models import Models
from trioserve.api.base.output import new_id
from trioserve.api.base.pooled import CutRequest, check_pools
from trioserve.api.base.readers import RawPrompt
from trioserve.api.base.reply import Json, Reply, json, long_json
from trioserve.api.base.routes import Query, Routes, of_kind
from trioserve.api.openapi import gives, takes
from trioserve.errors import InvalidRequestError
from trioserve.server.model_server import ModelServer
from trioserve.types import place_of

routes = Routes(of_model=True)

_T = TypeVar("_T")

#: Fields of vLLM that would have to change the result.
_UNSUPPORTED: Mapping[str, Only] = {
    "add_special_tokens": Only(True),
}


@json_type({**STRING, "type": ["string", "array"], "items": STRING, "maxItems": limits.MAX_INPUTS})
def _texts(value: Any) -> tuple[str, ...]:
    """Read a text, or a list of them."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(one, str) for one in texts):
        raise MismatchError("a string, or a list of strings, and not empty")
    return tuple(texts)


@json_type({"anyOf": [readers.RAW, list_schema(readers.RAW, limits.MAX_INPUTS, minItems=1)]})
def _inputs(value: Any) -> tuple[RawPrompt, ...]:
    """Read a text, a list of token ids, or a list of these."""

    def read(one: Any, _path: str) -> RawPrompt:
        if isinstance(one, str):
            return one
        if isinstance(one, list) and one and all(type(each) is int for each in one):
            return tuple(one)
        raise MismatchError("a string, a list of token ids, or a list of these")

    bounds = (limits.MAX_INPUTS, "texts")
    return readers.one_or_many(value, read, "input", bounds, "a string or a list")  # type: ignore[return-value]


@attrs.frozen(kw_only=True, slots=False)
class _TextsRequest(CutRequest):
    """What the two routes have in common."""

    unsupported = _UNSUPPORTED
    use_activation: bool = field("use_activation", "activation", "softmax", default=True)

    def check_activation(self, are_probs: bool) -> None:
        """Refuse scores without an activation of a model that has it in its graph."""
        if are_probs and not self.use_activation:
            raise InvalidRequestError.at(
                "use_activation", "must be true: this model gives probabilities."
            )


# -- scores


@attrs.frozen(kw_only=True, slots=False)
class ScoreRequest(_TextsRequest):
    """``POST /v1/score``."""

    text_1: tuple[str, ...] = field("text_1", "queries", "data_1", read=_texts)
    text_2: tuple[str, ...] = field("text_2", "documents", "items", "data_2", read=_texts)

    def __attrs_post_init__(self) -> None:
        if len(self.text_1) not in (1, len(self.text_2)):
            raise InvalidRequestError.at(
                "text_1", "must have one text, or as many as 'text_2': one for each of them."
            )


class _ListUsage(Answer, kw_only=True):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: None = None


class _List(Answer, kw_only=True):
    """What both lists have."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: Sequence[Any]
    usage: _ListUsage


class _Score(Answer):
    index: int
    score: float
    object: Literal["score"] = "score"


class Scores(_List, kw_only=True):
    """The answer of ``POST /v1/score``."""

    data: Sequence[_Score]


def _check_scores(server: ModelServer) -> None:
    server.model.check_scores()
    if server.model.pooling != "rank":
        check_pools(server)


@routes.post("/score", "/v1/score")
@of_kind(_check_scores)
@takes(ScoreRequest)
@gives(Scores)
async def score(request: ScoreRequest, caller: Caller, models: Models) -> Reply:
    """Score how well texts fit others: by a reranker, or by the cosine of their embeddings."""
    server = await models.use(request.model, caller)
    find = _by_reranker if server.model.pooling == "rank" else _by_cosine
    scores, n_tokens = await find(server, request, caller)
    data = sse.LazyList(lambda index: _Score(index, scores[index]), range(len(scores)))
    return _reply(Scores, "score", server, data, n_tokens, len(scores))


async def _by_reranker(
    server: ModelServer, request: ScoreRequest, caller: Caller
) -> tuple[Sequence[float], int]:
    queries: str | Sequence[str] = request.text_1
    with naming({"query": "text_1", "documents": "text_2"}):
        ranking = await server.rerank(
            queries[0] if len(queries) == 1 else queries,
            request.text_2,
            cut=request.cut,
            **(await request.counted(server, caller)),
        )
    request.check_activation(ranking.are_probs)
    scores = ranking.shares if request.use_activation else ranking.scores
    return scores, sum(ranking.n_tokens)


async def _by_cosine(
    server: ModelServer, request: ScoreRequest, caller: Caller
) -> tuple[Sequence[float], int]:
    if not request.use_activation:
        raise InvalidRequestError.at(
            "use_activation", "must be true: an embedding model gives cosines."
        )
    n_first = len(request.text_1)

    def place(index: int) -> str:
        if index < n_first:
            return place_of(index, request.text_1, "text_1")
        return place_of(index - n_first, request.text_2, "text_2")

    with naming({"input": place}):
        counted = await request.counted(server, caller)
        done = await request.embed(
            server,
            (*request.text_1, *request.text_2),
            lambda texts: server.embed(texts, normalize=2, **counted),
        )
    first, second = np.stack(done.vectors[:n_first]), np.stack(done.vectors[n_first:])
    scores: list[float] = (first * second).sum(axis=1).tolist()
    return scores, sum(done.n_tokens)


# -- classes


@attrs.frozen(kw_only=True, slots=False)
class ClassifyRequest(_TextsRequest):
    """``POST /v1/classify``."""

    input: tuple[RawPrompt, ...] = field("input", read=_inputs)


class _Class(Answer):
    index: int
    label: str | None
    probs: Sequence[float]
    num_classes: int


class Classes(_List, kw_only=True):
    """The answer of ``POST /v1/classify``."""

    data: Sequence[_Class]


@routes.post("/classify", "/v1/classify")
@of_kind(lambda server: server.model.check_classifies())
@takes(ClassifyRequest)
@gives(Classes)
async def classify(request: ClassifyRequest, caller: Caller, models: Models) -> Reply:
    """Find the class of each text."""
    server = await models.use(request.model, caller)
    counted = await request.counted(server, caller)
    found = await request.embed(
        server, request.input, lambda texts: server.classify(texts, **counted)
    )
    request.check_activation(found.are_probs)
    scores = found.probs if request.use_activation else found.scores

    def write(index: int) -> _Class:
        best = int(scores[index].argmax())
        label = found.labels[best] if best < len(found.labels) else None
        return _Class(index, label, scores[index].tolist(), len(scores[index]))

    data = sse.LazyList(write, range(len(scores)))
    n_tokens = sum(found.n_tokens)
    return _reply(Classes, "classify", server, data, n_tokens, sum(map(len, scores)))


def _reply(
    form: type[_List],
    kind: str,
    server: ModelServer,
    data: sse.LazyList,
    n_tokens: int,
    n_numbers: int,
) -> Json:
    written = form(
        id=new_id(kind),
        created=int(time.time()),
        model=server.model.info.name,
        data=data,
        usage=_ListUsage(prompt_tokens=n_tokens, total_tokens=n_tokens),
    )
    return long_json(lambda: written, n_numbers + 32 * len(data))


# -- the tokenizer


class TokenizerInfo(Answer, kw_only=True):
    """The tokenizer of a model."""

    tokenizer_class: str = "LlamaCpp"
    bos_token: str | None
    eos_token: str | None
    add_bos_token: bool
    model_max_length: int
    chat_template: str | None


@routes.get("/tokenizer_info")
@takes(None, query={"model": "the name of the model, in a router"})
@gives(TokenizerInfo)
async def tokenizer_info(query: Query, caller: Caller, models: Models) -> Reply:
    """Describe the tokenizer and the chat template."""
    model = (await models.use(query.get("model"), caller)).model
    return json(
        TokenizerInfo(
            bos_token=model.info.bos_token or None,
            eos_token=model.info.eos_token or None,
            add_bos_token=model.info.add_bos,
            model_max_length=model.n_ctx_seq,
            chat_template=model.info.chat_template,
        )
    )
