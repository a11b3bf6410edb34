"""OpenAI's Responses API: ``/v1/responses``, and ``/v1/responses/input_tokens``."""

from __future__ import annotations

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.generation import (
    admit,
    counted_tokens,
    open_streams,
    read_chat,
    respond_stream,
)
from trioserve.api.base.openapi import takes
from trioserve.api.base.request import current_request, long_response
from trioserve.api.base.service import current_responses
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
    request, chat = await read_chat(ResponsesRequest.parse)
    server, params, context = await admit(chat)
    with request.input.naming_items():
        (stream,) = await open_streams(
            server.chats.stream(chat.messages, params, chat.chat_params, context)
        )
    model = server.model
    builder = ResponseBuilder(model.info.name, request, chat, params, stream, model.vocab)
    if chat.stream:
        current_request().resources.enter_context(
            current_responses().running(
                builder.response["id"],
                [stream],
                context.client,
                reasoning_control=chat.reasoning_control,
            )
        )
        writer = ResponseEvents(builder, chat, len(stream.prompt))
        return await respond_stream(server, chat, [stream], writer, writer.fail)
    builder.begin()
    async for event in stream:
        if isinstance(event, ChatChunk):
            builder.add(event)
        elif isinstance(event, Finished):
            builder.finish(event)
    return await long_response(lambda: builder.response, 32 * builder.n_candidates)


@blueprint.post("/v1/responses/input_tokens")
@blueprint.post("/responses/input_tokens")
@takes(ResponsesRequest)
async def input_tokens() -> Response:
    """Count the tokens that a response would begin with."""
    request, chat = await read_chat(ResponsesRequest.parse)
    with request.input.naming_items():
        return await counted_tokens(chat)
