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
from trioserve.api.openai.responses.events import ResponseBuilder, ResponseEvents
from trioserve.api.openai.responses.request import ResponsesRequest
from trioserve.api.openai.runs import open_run, run_reply
from trioserve.api.openapi import gives, takes
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import ChatStream

routes = Routes(of_model=True)


@routes.post("/v1/responses", "/responses")
@takes(ResponsesRequest)
@gives(events.Response)
async def responses(request: ResponsesRequest, caller: Caller, models: Models) -> Reply:
    """Make a response, at once or as a stream."""
    chat = request.chat
    server, params, context = await admit(chat, caller, models)
    answer: ChatStream | AgentRun
    n_prompt, labels = 0, None
    with request.input.naming_items():
        if chat.run_tools is not None:
            answer = await open_run(server, chat, caller, params, context)
            labels = {name: tool.info.mcp_server for name, tool in server.tools.tools.items()}
        else:
            (answer,) = await caller.open(
                server.stream_chats(chat.messages, params, chat.chat_params, context=context)
            )
            n_prompt = len(answer.prompt)
    name = name_of(server, chat, params)
    builder = ResponseBuilder(name, request, params, n_prompt, labels)
    if not chat.stream:
        return await _whole(builder, answer, caller)
    writer, id_ = await ResponseEvents.of(builder, caller.held.n_bytes), builder.response["id"]
    if isinstance(answer, AgentRun):
        return await run_reply(server, chat, caller, models, answer, writer, id_, writer.fail)
    models.responses.add(id_, chat, caller, [answer])
    return await stream_reply(server, chat, caller, [answer], writer, writer.fail)


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
