"""Ollama's routes for text and embeddings: ``/api/chat``, ``/api/generate``, ``/api/embed``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from time import monotonic
from typing import Any

import attrs
import trio
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import limits, readers, sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.body import read_body_as
from trioserve.api.base.connection import current_request
from trioserve.api.base.fields import (
    STRING,
    MismatchError,
    RequestBody,
    field,
    json_type,
    strings,
)
from trioserve.api.base.generation import (
    admit,
    check_pools,
    gap_prompt,
    open_streams,
    read_chat,
    respond_stream,
)
from trioserve.api.base.http import current_context, json_response, long_response, size_of_outputs
from trioserve.api.base.output import name_of
from trioserve.api.base.rights import check_manages
from trioserve.api.base.service import keep_awake, read_for_model, server_for
from trioserve.api.base.text_tokens import probs_of
from trioserve.api.base.truncation import embed_cut
from trioserve.api.ollama.events import (
    CONTENT_TYPE,
    TEXT,
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
from trioserve.server.generation.embeddings import Array
from trioserve.server.lifecycle.sleep import ServerState
from trioserve.server.prompts.text import PromptLike
from trioserve.server.server import Server
from trioserve.server.stream import ChatCompletion, ChatStream, Stream
from trioserve.types import GenerationParams

# -- text


blueprint = Blueprint("ollama", __name__)


@blueprint.post("/api/chat")
@takes(OllamaChatRequest, streams=CONTENT_TYPE)
@gives(OllamaChat)
async def chat() -> Response:
    """Answer a chat, as a stream or at once. Without messages: load the model, or unload it."""
    request = await read_chat(OllamaChatRequest.parse)
    request.check(server_for(request.model))
    if not request.messages:
        return await _loaded(request, OllamaChat)
    server, params, context = await admit(request)
    writer = _writer(name_of(server, request, params), request, OllamaChat)
    (stream,) = await open_streams(
        server.stream_chats(request.messages, params, request.chat_params, context=context)
    )
    return await _answer(server, request, writer, stream)


@blueprint.post("/api/generate")
@takes(OllamaGenerateRequest, streams=CONTENT_TYPE)
@gives(OllamaGenerated)
async def generate() -> Response:
    """Answer or continue a prompt, or fill the gap before a suffix. Without a prompt: as chat."""
    request = await read_body_as(OllamaGenerateRequest.parse)
    request.check(server_for(request.model))
    if not (request.prompt or request.suffix or request.images):
        return await _loaded(request, OllamaGenerated)
    server, params, context = await admit(request)
    writer = _writer(name_of(server, request, params), request, OllamaGenerated)
    stream = await _generated(server, request, params, context)
    return await _answer(server, request, writer, stream)


async def _generated(
    server: Server,
    request: OllamaGenerateRequest,
    params: GenerationParams,
    context: RequestContext,
) -> Stream | ChatStream:
    """Open the stream of a prompt: a chat, unless the prompt is to be taken as it is."""
    if not (request.raw or request.suffix):
        (chat,) = await open_streams(
            server.stream_chats(request.messages, params, request.chat_params, context=context)
        )
        return chat
    prompt: PromptLike = request.prompt
    if request.suffix:
        prompt = await gap_prompt(server, prompt, request.suffix, params)
    (stream,) = await open_streams(server.stream_all([prompt], params, context=context))
    return stream


async def _loaded(request: OllamaRequest, kind: type[Part]) -> Response:
    """Load the model without generating; with a `keep_alive` of 0, free its memory."""
    server = server_for(request.model)
    server.model.check_generates()
    unload = request.keep_alive == 0
    if unload:
        check_manages("unloading the model")
    if not (unload and server.state is ServerState.SLEEPING):
        await keep_awake(server, current_context(request.timeout, request.keep_alive))
    writer = _writer(server.model.info.name, request, kind)
    return json_response(writer.nothing("unload" if unload else "load"))


def _writer(model: str, request: OllamaRequest, kind: type[Part]) -> Writer:
    """Make the writer of the answer to a request, once the model is loaded."""
    now = monotonic()
    return Writer(
        model=model,
        kind=kind,
        n_top=request.top_logprobs or 0,
        arrived=now - (trio.current_time() - current_request().arrived),
        ready=now,
    )


async def _answer(
    server: Server, request: OllamaRequest, writer: Writer, stream: Stream | ChatStream
) -> Response:
    """Stream the answer, or send it whole."""
    pieces = server.model.vocab.pieces
    if request.stream:
        events = OllamaEvents(writer, pieces if request.logprobs else None)
        return await respond_stream(server, request, [stream], events)
    done = await stream.read()
    if isinstance(done, ChatCompletion):
        message, probs = done.message, probs_of(pieces, done.chunks, TEXT)
    else:
        message, probs = Message(done.text), [*done.probs]
    return await long_response(
        lambda: writer.last(message, done.finished, probs), size_of_outputs([done])
    )


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
    """Read `input`; an empty text alone is none."""
    if isinstance(value, list):
        return strings(value)
    if not isinstance(value, str):
        raise MismatchError("a string or a list of strings")
    return (value,) if value else ()


@attrs.frozen(kw_only=True, slots=False)
class _EmbeddingRequest(RequestBody):
    """Fields of both embedding routes."""

    model: str | None = field(read=readers.model_name, default=None)
    options: ContextOptions = attrs.field(factory=ContextOptions)
    priority: int = 0
    timeout: float | None = field(read=readers.seconds, default=None)
    keep_alive: float | None = field(read=readers.keep_alive, default=None)


@attrs.frozen(kw_only=True, slots=False)
class OllamaEmbedRequest(_EmbeddingRequest):
    """``POST /api/embed``. Without texts it loads the model."""

    texts: tuple[str, ...] = field("input", read=_texts, default=())
    truncate: bool = True
    dimensions: int | None = field(read=readers.integer_in(1), default=None)


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


@blueprint.post("/api/embed")
@takes(OllamaEmbedRequest)
@gives(OllamaEmbeddings)
async def embed() -> Response:
    """Make a vector of length 1 of each text; texts that are too long are cut."""
    request, server = await read_for_model(OllamaEmbedRequest.parse, check_pools)
    context = await _ready(server, request)
    ready = monotonic()
    arrived = ready - (trio.current_time() - current_request().arrived)
    embed = partial(
        server.embed,
        dimensions=request.dimensions,
        normalize=_EUCLIDEAN,
        priority=request.priority,
        context=context,
    )
    done = await embed_cut(server, request.texts, embed) if request.truncate else None
    if done is None and request.texts:
        done = await embed(request.texts)
    vectors = () if done is None else done.vectors
    written = OllamaEmbeddings(
        server.model.info.name,
        nanoseconds(monotonic() - arrived),
        nanoseconds(ready - arrived),
        0 if done is None else sum(done.n_tokens),
        sse.LazyList(_numbers, vectors),
    )
    return await long_response(lambda: written, sum(map(len, vectors)))


@blueprint.post("/api/embeddings")
@takes(OllamaEmbeddingsRequest)
@gives(OllamaEmbedding)
async def embeddings() -> Response:
    """Make a vector of a text, with the length that the model gives it."""
    request, server = await read_for_model(OllamaEmbeddingsRequest.parse, check_pools)
    context = await _ready(server, request)
    if not request.prompt:
        return json_response(OllamaEmbedding(()))
    done = await server.embed(
        request.prompt, normalize=_NONE, priority=request.priority, context=context
    )
    (vector,) = done.vectors
    return await long_response(lambda: OllamaEmbedding(_numbers(vector)), len(vector))


def _numbers(vector: Array) -> list[float]:
    numbers: list[float] = vector.tolist()
    return numbers


async def _ready(server: Server, request: _EmbeddingRequest) -> RequestContext:
    """Load the model for a request, and make the request's context."""
    request.options.check(server.model.n_ctx_seq)
    context = current_context(request.timeout, request.keep_alive)
    await keep_awake(server, context)
    return context
