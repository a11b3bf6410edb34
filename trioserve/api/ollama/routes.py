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
    current_request,
    json_response,
    long_response,
    size_of_outputs,
)
from trioserve.api.ollama.events import Body, Parts, Writer, chat_body, generate_body
from trioserve.api.ollama.lines import CONTENT_TYPE, respond_lines
from trioserve.api.ollama.request import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaRequest,
)
from trioserve.chat.deltas import Message
from trioserve.server import RequestContext, Server
from trioserve.server.stream import ChatCompletion, ChatStream, Stream
from trioserve.server.tokens import PromptLike
from trioserve.types import GenerationParams

blueprint = Blueprint("ollama", __name__)


@blueprint.post("/api/chat")
@takes(OllamaChatRequest, streams=CONTENT_TYPE)
async def chat() -> Response:
    """Answer a chat, as a stream or at once. Without messages the model is loaded, and no more."""
    request = await read_chat(OllamaChatRequest.parse)
    server, params, context = await admit(request)
    writer = _writer(server, request, chat_body)
    if not request.messages:
        return json_response(writer.nothing("load"))
    (stream,) = await open_streams(
        server.chats.stream(request.messages, params, request.chat_params, context)
    )
    return await _answer(server, request, writer, stream)


@blueprint.post("/api/generate")
@takes(OllamaGenerateRequest, streams=CONTENT_TYPE)
async def generate() -> Response:
    """Answer or continue a prompt, or fill the gap before a suffix. Without a prompt: as chat."""
    request = await read_body_as(OllamaGenerateRequest.parse)
    server, params, context = await admit(request)
    writer = _writer(server, request, generate_body)
    if not request.prompt and not request.suffix:
        return json_response(writer.nothing("load"))
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


def _writer(server: Server, request: OllamaRequest, body: Body) -> Writer:
    """Make what writes the answer to a request that the server can answer.

    Raises:
        InvalidRequestError: it cannot; the message names the field.
    """
    request.check(server)
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
        parts = Parts(writer)
        return await respond_lines(server, request, stream, parts, parts.empty)
    done = await stream.read()
    message = done.message if isinstance(done, ChatCompletion) else Message(done.text)
    return await long_response(
        lambda: writer.last(message, done.finished, done.probs), size_of_outputs([done])
    )
