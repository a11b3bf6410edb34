"""Ollama's routes for text: ``/api/chat`` and ``/api/generate``."""

from __future__ import annotations

from time import monotonic

import trio
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.body import read_body_as
from trioserve.api.base.generation import admit, gap_prompt, open_streams, read_chat
from trioserve.api.base.openapi import takes
from trioserve.api.base.request import (
    current_context,
    current_request,
    json_response,
    long_response,
    size_of_outputs,
)
from trioserve.api.base.service import current_server, keep_awake
from trioserve.api.ollama.events import Body, Parts, Writer, chat_body, generate_body
from trioserve.api.ollama.lines import CONTENT_TYPE, respond_lines
from trioserve.api.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
)
from trioserve.chat.deltas import Message
from trioserve.server import RequestContext, Server
from trioserve.server.keeper import ServerState
from trioserve.server.stream import ChatCompletion, ChatStream, Stream
from trioserve.server.tokens import PromptLike
from trioserve.types import GenerationParams

blueprint = Blueprint("ollama", __name__)


@blueprint.post("/api/chat")
@takes(OllamaChatRequest, streams=CONTENT_TYPE)
async def chat() -> Response:
    """Answer a chat, as a stream or at once. Without messages: load the model, or unload it."""
    request = await read_chat(OllamaChatRequest.parse)
    request.check(current_server(request.model))
    if not request.messages:
        return await _loaded(request, chat_body)
    server, params, context = await admit(request)
    writer = _writer(server, request, chat_body)
    (stream,) = await open_streams(
        server.chats.stream(request.messages, params, request.chat_params, context)
    )
    return await _answer(server, request, writer, stream)


@blueprint.post("/api/generate")
@takes(OllamaGenerateRequest, streams=CONTENT_TYPE)
async def generate() -> Response:
    """Answer or continue a prompt, or fill the gap before a suffix. Without a prompt: as chat."""
    request = await read_body_as(OllamaGenerateRequest.parse)
    request.check(current_server(request.model))
    if not (request.prompt or request.suffix or request.images):
        return await _loaded(request, generate_body)
    server, params, context = await admit(request)
    writer = _writer(server, request, generate_body)
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
            server.chats.stream(request.messages, params, request.chat_params, context)
        )
        return chat
    prompt: PromptLike = request.prompt
    if request.suffix:
        prompt = await gap_prompt(server, prompt, request.suffix, params)
    (stream,) = await open_streams(server.completions.stream([prompt], params, context))
    return stream


async def _loaded(request: OllamaRequest, body: Body) -> Response:
    """Have the model in memory, and generate nothing; with a `keep_alive` of 0, free its memory."""
    server = current_server(request.model)
    server.model.check_generates()
    unload = request.keep_alive == 0
    if not (unload and server.state.value is ServerState.SLEEPING):
        await keep_awake(server, current_context(request.timeout, request.keep_alive))
    writer = _writer(server, request, body)
    return json_response(writer.nothing("unload" if unload else "load"))


def _writer(server: Server, request: OllamaRequest, body: Body) -> Writer:
    """Make what writes the answer to a request, once the model is there to answer it."""
    now = monotonic()
    return Writer(
        model=server.model.info.name,
        body=body,
        n_top=request.top_logprobs or 0,
        arrived=now - (trio.current_time() - current_request().arrived),
        ready=now,
    )


async def _answer(
    server: Server, request: OllamaRequest, writer: Writer, stream: Stream | ChatStream
) -> Response:
    """Send the stream as it comes, or read it and send all at once."""
    if request.stream:
        return await respond_lines(server, request, stream, Parts(writer), writer.empty)
    done = await stream.read()
    message = done.message if isinstance(done, ChatCompletion) else Message(done.text)
    return await long_response(
        lambda: writer.last(message, done.finished, done.probs), size_of_outputs([done])
    )
