"""Ranking documents: in the form of Jina and Cohere, and in that of text-embeddings-inference.

A request with `texts` is of the latter kind, one with `documents` of the former.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

import attrs
from msgspec import UNSET, UnsetType

from trioserve.api.base import limits, readers
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import (
    STRING,
    MismatchError,
    Only,
    field,
    integer_in,
    json_type,
    list_schema,
    naming,
    object_schema,
)
from trioserve.api.base.models import Models
from trioserve.api.base.pooled import CutRequest, Ranks, ranks_of
from trioserve.api.base.reply import Reply, long_json
from trioserve.api.base.routes import Routes, of_kind
from trioserve.api.base.usage import PromptUsage
from trioserve.api.openapi import gives, takes
from trioserve.errors import InvalidRequestError

routes = Routes(of_model=True)

#: Fields of Cohere's first API.
_UNSUPPORTED: Mapping[str, Only] = {
    "max_chunks_per_doc": Only(harmless="a document is one chunk, as long as the model takes it"),
    "rank_fields": Only(["text"]),
}


@json_type(
    list_schema(
        {**STRING, **object_schema(text=STRING), "type": ["string", "object"]},
        limits.MAX_INPUTS,
        minItems=1,
    )
)
def _documents(value: Any) -> tuple[str, ...]:
    """Read strings, or objects with a `text`."""
    if not isinstance(value, list) or not value:
        raise MismatchError("a list of strings, and not empty")
    texts: list[Any] = [each.get("text") if isinstance(each, dict) else each for each in value]
    if not all(isinstance(text, str) for text in texts):
        raise MismatchError("a list of strings, or of objects with a 'text'")
    return tuple(texts)


@attrs.frozen(kw_only=True)
class RerankRequest(CutRequest):
    """``POST /v1/rerank``."""

    unsupported = _UNSUPPORTED

    query: str
    documents: tuple[str, ...] | None = field(read=_documents, default=None)
    texts: tuple[str, ...] | None = field(read=_documents, default=None)
    top_n: int | None = field(read=readers.count, default=None)
    max_tokens_per_doc: int | None = field(read=integer_in(1), default=None)
    return_documents: bool = False
    return_text: bool = False
    raw_scores: bool = True
    use_activation: bool = field("use_activation", "activation", "softmax", default=False)

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Read the body of a request.

        Raises:
            InvalidRequestError: a field is wrong, or belongs to the other form.
        """
        request = super().parse(body)
        if (request.documents is None) == (request.texts is None):
            raise InvalidRequestError(
                "Either 'documents' or 'texts' is required.", param="documents"
            )
        form, other = ("documents", "texts") if request.texts is None else ("texts", "documents")
        for name in _OF_FORM[other]:
            if body.get(name) is not None:
                raise InvalidRequestError.at(name, f"does not go with '{form}'.")
        return request


#: Fields that have a meaning in one form only.
_OF_FORM = {
    "documents": ("return_documents", "use_activation", "activation", "softmax"),
    "texts": ("return_text", "raw_scores"),
}


class Ranking(Answer, kw_only=True):
    """The documents that fit best, the best first."""

    model: str
    object: Literal["list"] = "list"
    usage: PromptUsage
    results: Ranks


class _Scored(Answer):
    index: int
    score: float
    text: str | UnsetType = UNSET


@routes.post("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")
@of_kind(lambda server: server.model.check_ranks())
@takes(RerankRequest)
@gives(Ranking | list[_Scored])
async def rerank(request: RerankRequest, caller: Caller, models: Models) -> Reply:
    """Score how well documents fit a query."""
    server = await models.use(request.model, caller)
    given = request.documents or request.texts or ()
    with naming({"documents": "documents" if request.texts is None else "texts"}):
        ranking = await server.rerank(
            request.query,
            given,
            most=request.max_tokens_per_doc,
            cut=request.cut,
            **(await request.counted(server, caller)),
        )
    repeats = request.return_documents or request.return_text
    size = 32 * len(given) + repeats * sum(map(len, given)) // 32
    n_tokens = sum(ranking.n_tokens)
    raw = request.raw_scores and not request.use_activation

    def write() -> list[_Scored] | Ranking:
        best, scores = ranking.best(request.top_n), ranking.scores if raw else ranking.shares
        if request.texts is not None:
            shown = request.texts if request.return_text else None
            return [_Scored(i, scores[i], UNSET if shown is None else shown[i]) for i in best]
        return Ranking(
            model=server.model.info.name,
            usage=PromptUsage(n_tokens, n_tokens),
            results=ranks_of(best, scores, given if request.return_documents else None),
        )

    return long_json(write, size)
