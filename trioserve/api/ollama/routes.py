"""Ollama's routes for text and embeddings: ``/api/chat``, ``/api/generate``, ``/api/embed``."""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from time import monotonic
from typing import Any

import attrs

from trioserve.api.base import limits, readers, sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller, waited
from trioserve.api.base.fields import (
    STRING,
    MismatchError,
    field,
    integer_in,
    json_type,
    strings,
)
from trioserve.api.base.generation import admit, gap_prompt, stream_reply
from trioserve.api.base.models import Models
from trioserve.api.base.output import name_of
from trioserve.api.base.pooled import PooledRequest, check_pools, embed_cut, numbers_of
from trioserve.api.base.reply import Reply, json, long_json, size_of_outputs
from trioserve.api.base.routes import Routes, Waiting, of_kind, while_unloaded
from trioserve.api.base.text_tokens import probs_of
from trioserve.api.ollama.events import (
    CONTENT_TYPE,
    OllamaChat,
    OllamaEvents,
    OllamaGenerated,
    Part,
    Writer,
    nanoseconds,
)
from trioserve.api.ollama.request import (
    ContextOptions,
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
)
from trioserve.api.openapi import gives, takes
from trioserve.chat.deltas import Message
from trioserve.server import RequestContext
from trioserve.server.generation.embeddings import Embeddings
from trioserve.server.model_server import ModelServer
from trioserve.server.prompts.text import PromptLike
from trioserve.server.stream import ChatCompletion, ChatStream, Stream
from trioserve.types import GenerationParams

# -- text


routes = Routes(of_model=True)


def _waiting(kind: type[Part]) -> Waiting:
    """The answers of a route to a client whose model is not loaded."""

    def answer(fields: Mapping[str, Any]) -> Any:
        """Answer a request that asks for nothing but the model's memory back."""
        if any(fields.get(name) for name in ("messages", "prompt", "suffix")):
            return None
        try:
            frees = readers.keep_alive(fields.get("keep_alive")) == 0
        except MismatchError:  # or it is not there
            return None
        model = fields.get("model") or fields.get("name") or ""
        return Writer(model=model, kind=kind).nothing("unload") if frees else None

    return Waiting(lambda model: Writer(model=model, kind=kind).empty(), answer)


@routes.post("/api/chat")
@while_unloaded(_waiting(OllamaChat))
@takes(OllamaChatRequest, streams=CONTENT_TYPE)
@gives(OllamaChat)
async def chat(request: OllamaChatRequest, caller: Caller, models: Models) -> Reply:
    """Answer a chat, as a stream or at once. Without messages: load the model, or unload it."""
    request.check(await models.use(request.model, caller))
    if not request.messages:
        return await _loaded(request, caller, models, OllamaChat)
    server, params, context = await admit(request, caller, models)
    writer = _writer(name_of(server, request, params), request, caller, OllamaChat)
    (stream,) = await caller.open(
        server.stream_chats(request.messages, params, request.chat_params, context=context)
    )
    return await _answer(server, request, caller, writer, stream)


@routes.post("/api/generate")
@while_unloaded(_waiting(OllamaGenerated))
@takes(OllamaGenerateRequest, streams=CONTENT_TYPE)
@gives(OllamaGenerated)
async def generate(request: OllamaGenerateRequest, caller: Caller, models: Models) -> Reply:
    """Answer or continue a prompt, or fill the gap before a suffix. Without a prompt: as chat."""
    request.check(await models.use(request.model, caller))
    if not (request.prompt or request.suffix or request.images):
        return await _loaded(request, caller, models, OllamaGenerated)
    server, params, context = await admit(request, caller, models)
    writer = _writer(name_of(server, request, params), request, caller, OllamaGenerated)
    stream = await _generated(server, request, caller, params, context)
    return await _answer(server, request, caller, writer, stream)


async def _generated(
    server: ModelServer,
    request: OllamaGenerateRequest,
    caller: Caller,
    params: GenerationParams,
    context: RequestContext,
) -> Stream | ChatStream:
    """Open the stream of a prompt: a chat, unless the prompt is to be taken as it is."""
    if not (request.raw or request.suffix):
        (chat,) = await caller.open(
            server.stream_chats(request.messages, params, request.chat_params, context=context)
        )
        return chat
    prompt: PromptLike = request.prompt
    if request.suffix:
        prompt = await gap_prompt(server, prompt, request.suffix, params)
    (stream,) = await caller.open(server.stream_all([prompt], params, context=context))
    return stream


async def _loaded(
    request: OllamaRequest, caller: Caller, models: Models, kind: type[Part]
) -> Reply:
    """Load the model without generating; with a `keep_alive` of 0, free its memory."""
    server = await models.use(request.model, caller)
    server.model.check_generates()
    unload = request.keep_alive == 0
    if unload:
        caller.check_manages("unloading the model")
    if not (unload and server.sleeping):
        context = await caller.counted(server, request.timeout, request.keep_alive)
        await caller.keep_awake(server, context)
    writer = _writer(server.model.info.name, request, caller, kind)
    return json(writer.nothing("unload" if unload else "load"))


def _writer(model: str, request: OllamaRequest, caller: Caller, kind: type[Part]) -> Writer:
    """Make the writer of the answer to a request, once the model is loaded."""
    now = monotonic()
    return Writer(
        model=model,
        kind=kind,
        n_top=request.top_logprobs or 0,
        arrived=now - waited(caller),
        ready=now,
    )


async def _answer(
    server: ModelServer,
    request: OllamaRequest,
    caller: Caller,
    writer: Writer,
    stream: Stream | ChatStream,
) -> Reply:
    """Stream the answer, or send it whole."""
    if request.stream:
        events = OllamaEvents(writer, with_probs=request.logprobs)
        return await stream_reply(server, request, caller, [stream], events)
    done = await stream.read()
    if isinstance(done, ChatCompletion):
        message, probs = done.message, probs_of(done.chunks)
    else:
        message, probs = Message(done.text), [*done.probs]
    return long_json(lambda: writer.last(message, done.finished, probs), size_of_outputs([done]))


# -- embeddings


#: The norms of the two routes: 1, and as the model has it.
_EUCLIDEAN, _NONE = 2, -1


@json_type(
    {
        "type": ["string", "array"],
        "items": STRING,
        "maxLength": limits.MAX_PROMPT_CHARS,
        "maxItems": limits.MAX_INPUTS,
        "description": "A text, or a list of them.",
    }
)
def _texts(value: Any) -> tuple[str, ...]:
    """Read `input`; a single empty text is left out."""
    if isinstance(value, list):
        return strings(value)
    if not isinstance(value, str):
        raise MismatchError("a string or a list of strings")
    return (value,) if value else ()


@attrs.frozen(kw_only=True, slots=False)
class _EmbeddingRequest(PooledRequest):
    """Fields of both embedding routes."""

    model_names = ("model", "name")
    options: ContextOptions = attrs.field(factory=ContextOptions)


@attrs.frozen(kw_only=True, slots=False)
class OllamaEmbedRequest(_EmbeddingRequest):
    """``POST /api/embed``. Without texts it loads the model."""

    texts: tuple[str, ...] = field("input", read=_texts, default=())
    truncate: bool = True
    dimensions: int | None = field(read=integer_in(1), default=None)


@attrs.frozen(kw_only=True, slots=False)
class OllamaEmbeddingsRequest(_EmbeddingRequest):
    """``POST /api/embeddings``. Without a prompt it loads the model."""

    prompt: str = ""


class OllamaEmbeddings(Answer):
    """The embeddings of texts."""

    model: str
    total_duration: int
    load_duration: int
    prompt_eval_count: int
    embeddings: Sequence[Sequence[float]]


class OllamaEmbedding(Answer):
    """The embedding of one text."""

    embedding: Sequence[float]


@routes.post("/api/embed")
@of_kind(check_pools)
@takes(OllamaEmbedRequest)
@gives(OllamaEmbeddings)
async def embed(request: OllamaEmbedRequest, caller: Caller, models: Models) -> Reply:
    """Make a vector of length 1 of each text; texts that are too long are cut."""
    server = await models.use(request.model, caller)
    counted = await _ready(server, request, caller)
    ready = monotonic()
    arrived = ready - waited(caller)

    def embed(texts: Sequence[PromptLike]) -> Awaitable[Embeddings]:
        return server.embed(texts, dimensions=request.dimensions, normalize=_EUCLIDEAN, **counted)

    done = await embed_cut(server, request.texts, embed) if request.truncate else None
    if done is None and request.texts:
        done = await embed(request.texts)
    vectors = () if done is None else done.vectors
    written = OllamaEmbeddings(
        server.model.info.name,
        nanoseconds(monotonic() - arrived),
        nanoseconds(ready - arrived),
        0 if done is None else sum(done.n_tokens),
        sse.LazyList(numbers_of, vectors),
    )
    return long_json(lambda: written, sum(map(len, vectors)))


@routes.post("/api/embeddings")
@of_kind(check_pools)
@takes(OllamaEmbeddingsRequest)
@gives(OllamaEmbedding)
async def embeddings(request: OllamaEmbeddingsRequest, caller: Caller, models: Models) -> Reply:
    """Make a vector of a text, with the length that the model gives it."""
    server = await models.use(request.model, caller)
    counted = await _ready(server, request, caller)
    if not request.prompt:
        return json(OllamaEmbedding(()))
    done = await server.embed(request.prompt, normalize=_NONE, **counted)
    (vector,) = done.vectors
    return long_json(lambda: OllamaEmbedding(numbers_of(vector)), len(vector))


async def _ready(server: ModelServer, request: _EmbeddingRequest, caller: Caller) -> dict[str, Any]:
    """Load the model for a request; see `PooledRequest.counted`."""
    request.options.check(server.model.n_ctx_seq)
    counted = await request.counted(server, caller)
    await caller.keep_awake(server, counted["context"])
    return counted
