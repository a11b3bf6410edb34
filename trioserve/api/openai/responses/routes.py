"""OpenAI's Responses API: ``/v1/responses``, and below it ``/input_tokens`` and ``/compact``."""

from __future__ import annotations

from trioserve.api.base import generation
from trioserve.api.base.answers import InputTokens
from trioserve.api.base.caller import Caller
from trioserve.api.base.generation import admit, counted_tokens, stream_reply
from trioserve.api.base.models import Models
from trioserve.api.base.output import name_of
from trioserve.api.base.reply import Reply, long_json
from trioserve.api.base.routes import Routes
from trioserve.api.openai.responses import events
from trioserve.api.openai.responses.events import ResponseBuilder, ResponseEvents
from trioserve.api.openai.responses.input import last_of
from trioserve.api.openai.responses.request import CompactRequest, ResponsesRequest
from trioserve.api.openai.runs import open_run, run_reply
from trioserve.api.openapi import gives, takes
from trioserve.server.compaction import (
    CompactedChat,
    CompactionPlan,
    length_of,
    limit_of,
    open_fitting,
    stream_compacted,
)
from trioserve.server.model_server import ModelServer
from trioserve.server.runs.run import AgentRun
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
    answer: ChatStream | AgentRun | CompactedChat
    n_prompt, labels = 0, None
    web = request.hosted.offered(server)
    with request.input.naming_items():
        if (plan := await _plan(request, server, params)) is not None:
            answer = await caller.open(
                stream_compacted(server, chat.messages, params, chat.chat_params, plan, context)
            )
        elif web or chat.run_tools is not None:
            answer = await open_run(server, chat, caller, params, context, web)
            labels = {name: tool.info.mcp_server for name, tool in server.tools.tools.items()}
        else:
            chat = request.hosted.left_out_of(chat)
            answer = await open_fitting(
                caller.open,
                server,
                chat.messages,
                params,
                chat.chat_params,
                context,
                truncates=request.truncation == "auto",
            )
            n_prompt = len(answer.prompt)
    name = name_of(server, chat, params)
    builder = ResponseBuilder(
        name, request, params, n_prompt, labels, [tool.info.name for tool in web]
    )
    if not chat.stream:
        return await _whole(builder, answer, caller)
    writer, id_ = await ResponseEvents.of(builder, caller.held.n_bytes), builder.response["id"]
    if isinstance(answer, AgentRun):
        return await run_reply(server, chat, caller, models, answer, writer, id_, writer.fail)
    if isinstance(answer, CompactedChat):
        models.responses.add(id_, chat, caller, answer.streams)
        return await generation.run_reply(server, chat, caller, answer, writer, writer.fail)
    models.responses.add(id_, chat, caller, [answer])
    return await stream_reply(server, chat, caller, [answer], writer, writer.fail)


async def _plan(
    request: ResponsesRequest, server: ModelServer, params: GenerationParams
) -> CompactionPlan | None:
    """Decide whether the conversation is compacted, and how."""
    chat = request.chat
    if request.compacts or request.input.trigger:
        return CompactionPlan(limit=limit_of(server, params), spares_users=True, answers=False)
    if not request.context_management:
        return None
    asked = [one.compact_threshold for one in request.context_management]
    limit = limit_of(server, params, min((one for one in asked if one), default=None))
    if await length_of(server, chat.messages, chat.chat_params) < limit:
        return None
    truncates = request.truncation == "auto"
    return CompactionPlan(limit=limit, may_fail=True, truncates=truncates)


async def _whole(
    builder: ResponseBuilder, answer: ChatStream | AgentRun | CompactedChat, caller: Caller
) -> Reply:
    """Answer with the response when it is complete."""
    builder.begin()
    async for event in answer:
        builder.take(event)
    if isinstance(answer, ChatStream):
        assert answer.finished is not None
        builder.take(answer.finished)
    size = caller.held.n_bytes // 32 + 32 * builder.n_candidates
    return long_json(lambda: builder.response, size)


@routes.post("/v1/responses/compact", "/responses/compact")
@takes(CompactRequest)
@gives(events.CompactedResponse)
async def compact(request: CompactRequest, caller: Caller, models: Models) -> Reply:
    """Compact a conversation: give what the user has said last, and a compaction of all."""
    chat = request.chat
    server, params, context = await admit(chat, caller, models)
    plan = await _plan(request, server, params)
    assert plan is not None
    with request.input.naming_items():
        answer = await caller.open(
            stream_compacted(server, chat.messages, params, chat.chat_params, plan, context)
        )
        builder = ResponseBuilder(name_of(server, chat, params), request, params, 0)
        await _whole(builder, answer, caller)
    users = last_of(request.input.users, limit_of(server, params) // 4)
    written = events.CompactedResponse.of(builder.response, users)
    return long_json(lambda: written, caller.held.n_bytes // 32)


@routes.post("/v1/responses/input_tokens", "/responses/input_tokens")
@takes(ResponsesRequest)
@gives(InputTokens)
async def input_tokens(request: ResponsesRequest, caller: Caller, models: Models) -> Reply:
    """Count the tokens that a response would begin with."""
    with request.input.naming_items():
        return await counted_tokens(request.chat, caller, models, request.hosted)
