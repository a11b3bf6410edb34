"""OpenAI's Responses API: ``/v1/responses``, and ``/v1/responses/input_tokens``."""

from __future__ import annotations

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import sse
from trioserve.api.base.generation import options_for, pings_for, read_chat
from trioserve.api.base.openapi import takes
from trioserve.api.base.request import current_request, json_response
from trioserve.api.base.service import current_server
from trioserve.api.base.terms import terms_of
from trioserve.api.llama import control
from trioserve.api.openai.chat import chat_arguments, counted
from trioserve.api.openai.responses.events import ResponseBuilder, ResponseEvents
from trioserve.api.openai.responses.request import ResponsesRequest
from trioserve.server.stream import ChatChunk
from trioserve.types import Finished

blueprint = Blueprint("responses", __name__)


@blueprint.post("/v1/responses")
@blueprint.post("/responses")
@takes(ResponsesRequest)
async def responses() -> Response:
    """Make a response, at once or as a stream. Nothing is stored."""
    wanted, chat = ResponsesRequest.parse(await read_chat())
    server, request = current_server(), current_request()
    options, terms = await options_for(server, chat), terms_of(chat)
    with wanted.input.naming_items():
        stream = await request.resources.enter_async_context(
            server.stream_chat(chat.messages, options, **chat_arguments(chat), **terms.arguments())
        )
    builder = ResponseBuilder(server.info.name, wanted, chat, options, stream, server.vocab)
    if chat.stream:
        request.sends(stream.mailbox)
        request.resources.enter_context(
            control.running(builder.response["id"], [stream], reasoning=chat.reasoning_control)
        )
        events = ResponseEvents(builder, chat, len(stream.prompt))
        pings = pings_for(server, chat, [stream])
        return await sse.respond(request, sse.feed_of(stream), events, events.fail, pings)
    builder.begin()
    async for event in stream:
        if isinstance(event, ChatChunk):
            builder.add(event)
        elif isinstance(event, Finished):
            builder.finish(event)
    return json_response(builder.response)


@blueprint.post("/v1/responses/input_tokens")
@blueprint.post("/responses/input_tokens")
@takes(ResponsesRequest)
async def input_tokens() -> Response:
    """Count the tokens that a response would begin with."""
    wanted, chat = ResponsesRequest.parse(await read_chat())
    with wanted.input.naming_items():
        return await counted(chat)
