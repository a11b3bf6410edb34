"""OpenAI's Responses API: ``/v1/responses``, and ``/v1/responses/input_tokens``."""

from __future__ import annotations

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.answers import InputTokens
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.base.connection import current_request
from trioserve.api.base.generation import (
    admit,
    counted_tokens,
    open_streams,
    read_chat,
    respond_stream,
)
from trioserve.api.base.http import long_response
from trioserve.api.base.output import name_of
from trioserve.api.base.stored_as import STORED, StoredAs
from trioserve.api.openai.responses import events
from trioserve.api.openai.responses.events import (
    ResponseBuilder,
    ResponseEvents,
)
from trioserve.api.openai.responses.request import ResponsesRequest
from trioserve.api.openai.runs import open_run, respond_run
from trioserve.api.openapi import gives, takes
from trioserve.server import RequestContext
from trioserve.server.runs.run import AgentRun
from trioserve.server.server import Server
from trioserve.server.stream import ChatStream
from trioserve.types import GenerationParams

blueprint = Blueprint("responses", __name__)


@blueprint.post("/v1/responses")
@blueprint.post("/responses")
@takes(ResponsesRequest)
@gives(events.Response)
async def responses() -> Response:
    """Make a response, at once or as a stream. Nothing is stored."""
    request, chat = await _read()
    server, params, context = await admit(chat)
    if chat.run_tools is not None:
        return await _run(server, request, chat, params, context)
    with request.input.naming_items():
        (stream,) = await open_streams(
            server.stream_chats(chat.messages, params, chat.chat_params, context=context)
        )
    n_prompt, name = len(stream.prompt), name_of(server, chat, params)
    builder = ResponseBuilder(name, request, chat, params, n_prompt, server.model.vocab)
    if not chat.stream:
        return await _whole(builder, stream)
    writer = await ResponseEvents.of(builder, chat, n_prompt)
    id_ = builder.response["id"]
    return await respond_stream(server, chat, [stream], writer, writer.fail, id_=id_)


async def _read() -> tuple[ResponsesRequest, ChatRequest]:
    """Read the current request. Raises as `read_chat`."""
    stored = StoredAs.of_current()
    return await read_chat(lambda body: ResponsesRequest.parse_with_chat({**body, STORED: stored}))


async def _run(
    server: Server,
    request: ResponsesRequest,
    chat: ChatRequest,
    params: GenerationParams,
    context: RequestContext,
) -> Response:
    """Make a response whose tools the server runs."""
    with request.input.naming_items():
        run = await open_run(server, chat, params, context)
    name, vocab = name_of(server, chat, params), server.model.vocab
    labels = {name: tool.info.mcp_server for name, tool in server.tools.tools.items()}
    builder = ResponseBuilder(name, request, chat, params, 0, vocab, labels)
    if not chat.stream:
        return await _whole(builder, run)
    writer = await ResponseEvents.of(builder, chat, 0)
    return await respond_run(server, chat, run, writer, builder.response["id"], writer.fail)


async def _whole(builder: ResponseBuilder, answer: ChatStream | AgentRun) -> Response:
    """Make the response that is sent when it is complete."""
    builder.begin()
    async for event in answer:
        builder.take(event)
    if isinstance(answer, ChatStream):
        assert answer.finished is not None
        builder.take(answer.finished)
    size = current_request().held.n_bytes // 32 + 32 * builder.n_candidates
    return await long_response(lambda: builder.response, size)


@blueprint.post("/v1/responses/input_tokens")
@blueprint.post("/responses/input_tokens")
@takes(ResponsesRequest)
@gives(InputTokens)
async def input_tokens() -> Response:
    """Count the tokens that a response would begin with."""
    request, chat = await _read()
    with request.input.naming_items():
        return await counted_tokens(chat)
