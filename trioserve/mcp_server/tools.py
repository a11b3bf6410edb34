"""What programs may call: `TOOLS`, each with the form of its arguments and of its result."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

import attrs
import msgspec
from msgspec import UNSET, Meta, UnsetType

from trioserve.mcp_server.chats import Chatted, chat
from trioserve.mcp_server.models import Listed, Models
from trioserve.mcp_server.report import Report

Arguments = TypeVar("Arguments", bound=msgspec.Struct)


@attrs.frozen(kw_only=True)
class ModelTool(Generic[Arguments]):
    """A tool. `call` raises TrioServeError."""

    name: str
    title: str
    description: str
    arguments: type[Arguments]
    result: type[msgspec.Struct]
    call: Callable[[Models, Arguments, Report], Awaitable[msgspec.Struct]]


class _Form(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Arguments. What is not known is refused, because it would have no effect."""


_Model: TypeAlias = (
    Annotated[
        str,
        Meta(description="Name of the model, as list_models has it. Default: the one there is."),
    ]
    | UnsetType
)


class Earlier(_Form):
    """An earlier message of the chat."""

    role: Literal["system", "user", "assistant"]
    content: str


class ChatForm(_Form):
    """Arguments of `chat`."""

    prompt: Annotated[str, Meta(description="What to ask the model.")]
    system: Annotated[str, Meta(description="Instructions for the model.")] = ""
    history: Annotated[list[Earlier], Meta(description="The chat before, oldest first.")] = []
    model: _Model = UNSET
    max_tokens: (
        Annotated[int, Meta(ge=1, description="Tokens that the answer may have.")] | UnsetType
    ) = UNSET
    temperature: (
        Annotated[float, Meta(ge=0, description="How random the answer is; 0: not at all.")]
        | UnsetType
    ) = UNSET
    json_schema: (
        Annotated[dict[str, Any], Meta(description="JSON Schema that the answer follows.")]
        | UnsetType
    ) = UNSET


async def _chat(models: Models, form: ChatForm, report: Report) -> Chatted:
    messages = [msgspec.to_builtins(one) for one in form.history]
    if form.system:
        messages.insert(0, {"role": "system", "content": form.system})
    request: dict[str, Any] = {
        "messages": [*messages, {"role": "user", "content": form.prompt}],
        **_given(form, "model", "max_tokens", "temperature"),
    }
    if form.json_schema is not UNSET:
        schema = {"name": "answer", "schema": form.json_schema}
        request["response_format"] = {"type": "json_schema", "json_schema": schema}
    return await chat(models, request, report.waits, report.comes)


class EmbedForm(_Form):
    """Arguments of `embed`."""

    texts: Annotated[list[str], Meta(min_length=1, description="The texts.")]
    model: _Model = UNSET
    dimensions: (
        Annotated[
            int,
            Meta(ge=1, description="Numbers to keep of each embedding."),
        ]
        | UnsetType
    ) = UNSET


class Embedded(msgspec.Struct):
    """Embeddings, in the order of the texts."""

    embeddings: list[list[float]]
    model: str


class _Vector(msgspec.Struct):
    index: int
    embedding: list[float]


class _Vectors(msgspec.Struct):
    data: list[_Vector]
    model: str


async def _embed(models: Models, form: EmbedForm, report: Report) -> Embedded:
    body = {"input": form.texts, **_given(form, "model", "dimensions")}
    answer = await models.ask("/v1/embeddings", body, _Vectors, report.waits)
    ordered = sorted(answer.data, key=lambda one: one.index)
    return Embedded([one.embedding for one in ordered], answer.model)


class RerankForm(_Form):
    """Arguments of `rerank`."""

    query: Annotated[str, Meta(description="What is looked for.")]
    documents: Annotated[list[str], Meta(min_length=1, description="The documents to rank.")]
    model: _Model = UNSET
    top_n: Annotated[int, Meta(ge=1, description="Only so many of the best.")] | UnsetType = UNSET


class Ranked(msgspec.Struct):
    """A document: its place in the list that was given, and how well it fits."""

    index: int
    score: float


class Ranking(msgspec.Struct):
    """Documents, the best first."""

    results: list[Ranked]
    model: str


class _Score(msgspec.Struct):
    index: int
    relevance_score: float


class _Scores(msgspec.Struct):
    results: list[_Score]
    model: str


async def _rerank(models: Models, form: RerankForm, report: Report) -> Ranking:
    body = {"query": form.query, "documents": form.documents}
    body |= _given(form, "model", "top_n")
    answer = await models.ask("/v1/rerank", body, _Scores, report.waits)
    best = sorted(answer.results, key=lambda one: -one.relevance_score)
    return Ranking([Ranked(one.index, one.relevance_score) for one in best], answer.model)


class TokenizeForm(_Form):
    """Arguments of `tokenize`."""

    text: Annotated[str, Meta(description="The text.")]
    model: _Model = UNSET


class Tokens(msgspec.Struct):
    """Token ids, and how many they are."""

    tokens: list[int]
    count: int


class _Tokens(msgspec.Struct):
    tokens: list[int]


async def _tokenize(models: Models, form: TokenizeForm, report: Report) -> Tokens:
    body = {"content": form.text, **_given(form, "model")}
    answer = await models.ask("/tokenize", body, _Tokens, report.waits)
    return Tokens(answer.tokens, len(answer.tokens))


class DetokenizeForm(_Form):
    """Arguments of `detokenize`."""

    tokens: Annotated[list[int], Meta(description="Token ids of the model.")]
    model: _Model = UNSET


class Text(msgspec.Struct):
    """A text."""

    text: str


class _Content(msgspec.Struct):
    content: str


async def _detokenize(models: Models, form: DetokenizeForm, report: Report) -> Text:
    body = {"tokens": form.tokens, **_given(form, "model")}
    return Text((await models.ask("/detokenize", body, _Content, report.waits)).content)


class NoForm(_Form):
    """Arguments of `list_models`: none."""


class Listing(msgspec.Struct):
    """The models, and whether they are in memory."""

    models: list[Listed]


async def _list(models: Models, form: NoForm, report: Report) -> Listing:
    return Listing(await models.listed())


def _given(form: _Form, *names: str) -> dict[str, Any]:
    """Take the fields that are set: for the others, the server has defaults of its own."""
    values = {name: getattr(form, name) for name in names}
    return {name: value for name, value in values.items() if value is not UNSET}


TOOLS: Sequence[ModelTool[Any]] = (
    ModelTool(
        name="chat",
        title="Ask a model",
        description="Ask a language model that runs locally, and get its answer.",
        arguments=ChatForm,
        result=Chatted,
        call=_chat,
    ),
    ModelTool(
        name="embed",
        title="Make embeddings",
        description="Turn texts into vectors, to find out which are alike in meaning. Needs a "
        "model that was started with --embeddings.",
        arguments=EmbedForm,
        result=Embedded,
        call=_embed,
    ),
    ModelTool(
        name="rerank",
        title="Rank documents",
        description="Sort documents by how well they fit a query. Needs a model that was started "
        "with --reranking.",
        arguments=RerankForm,
        result=Ranking,
        call=_rerank,
    ),
    ModelTool(
        name="tokenize",
        title="Turn text into tokens",
        description="Turn text into the token ids of a model, and count them.",
        arguments=TokenizeForm,
        result=Tokens,
        call=_tokenize,
    ),
    ModelTool(
        name="detokenize",
        title="Turn tokens into text",
        description="Turn token ids of a model back into text.",
        arguments=DetokenizeForm,
        result=Text,
        call=_detokenize,
    ),
    ModelTool(
        name="list_models",
        title="List the models",
        description="List the models that the other tools can use, and whether they are loaded.",
        arguments=NoForm,
        result=Listing,
        call=_list,
    ),
)
