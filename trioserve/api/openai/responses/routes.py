"""OpenAI's Responses API: ``/v1/responses``, and ``/v1/responses/input_tokens``."""

from __future__ import annotations

from trioserve.api.base.answers import InputTokens
from trioserve.api.base.caller import Caller
from trioserve.api.base.generation import admit, counted_tokens, stream_reply
from trioserve.api.base.models import Models
from trioserve.api.base.output import name_of
from trioserve.api.base.reply import Reply, long_json
from trioserve.api.base.routes import Routes
from trioserve.api.openai.responses import events
from trioserve.api.openai.responses.events import (
    ResponseBuilder,
    ResponseEvents,
)
from trioserve.api.openai.responses.request import ResponsesRequest
from trioserve.api.openai.runs import open_run, run_reply
from trioserve.api.openapi import gives, takes
from trioserve.server import RequestContext
from trioserve.server.runs.run import AgentRun
from trioserve.server.server import Server
from trioserve.server.stream import ChatStream
from trioserve.types import GenerationParams

routes = Routes(of_model=True)


@routes.post("/v1/responses", "/responses")
@takes(ResponsesRequest)
@gives(events.Response)
async def responses(request: ResponsesRequest, caller: Caller, models: Models) -> Reply:
    """Make a response, at once or as a stream."""
    chat = request.chat
    server, params, context = await admit(chat, caller, models)
    if chat.run_tools is not None:
        return await _run(server, request, caller, models, params, context)
    with request.input.naming_items():
        (stream,) = await caller.open(
            server.stream_chats(chat.messages, params, chat.chat_params, context=context)
        )
    n_prompt, name = len(stream.prompt), name_of(server, chat, params)
    builder = ResponseBuilder(name, request, params, n_prompt, server.model.vocab)
    if not chat.stream:
        return await _whole(builder, stream, caller)
    writer = await ResponseEvents.of(builder, chat, n_prompt, caller.held.n_bytes)
    models.responses.add(builder.response["id"], chat, caller, [stream])
    return await stream_reply(server, chat, caller, [stream], writer, writer.fail)


async def _run(
    server: Server,
    request: ResponsesRequest,
    caller: Caller,
    models: Models,
    params: GenerationParams,
    context: RequestContext,
) -> Reply:
    """Make a response whose tools the server runs."""
    chat = request.chat
    with request.input.naming_items():
        run = await open_run(server, chat, caller, params, context)
    name, vocab = name_of(server, chat, params), server.model.vocab
    labels = {name: tool.info.mcp_server for name, tool in server.tools.tools.items()}
    builder = ResponseBuilder(name, request, params, 0, vocab, labels)
    if not chat.stream:
        return await _whole(builder, run, caller)
    writer = await ResponseEvents.of(builder, chat, 0, caller.held.n_bytes)
    id_ = builder.response["id"]
    return await run_reply(server, chat, caller, models, run, writer, id_, writer.fail)


async def _whole(builder: ResponseBuilder, answer: ChatStream | AgentRun, caller: Caller) -> Reply:
    """Answer with the response when it is complete."""
    builder.begin()
    async for event in answer:
        builder.take(event)
    if isinstance(answer, ChatStream):
        assert answer.finished is not None
        builder.take(answer.finished)
    size = caller.held.n_bytes // 32 + 32 * builder.n_candidates
    return long_json(lambda: builder.response, size)


@routes.post("/v1/responses/input_tokens", "/responses/input_tokens")
@takes(ResponsesRequest)
@gives(InputTokens)
async def input_tokens(request: ResponsesRequest, caller: Caller, models: Models) -> Reply:
    """Count the tokens that a response would begin with."""
    with request.input.naming_items():
        return await counted_tokens(request.chat, caller, models)
