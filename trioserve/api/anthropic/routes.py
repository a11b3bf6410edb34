"""Anthropic's routes: ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.anthropic.events import (
    Blocks,
    Head,
    MessageEvents,
    last_event,
    whole_message,
)
from trioserve.api.anthropic.request import CountTokensRequest, MessagesRequest
from trioserve.api.base import sse
from trioserve.api.base.generation import options_for, pings_for, read_chat
from trioserve.api.base.openapi import takes
from trioserve.api.base.request import current_request, json_response
from trioserve.api.base.request_id import current_request_id
from trioserve.api.base.service import current_server
from trioserve.api.base.terms import terms_of

blueprint = Blueprint("anthropic", __name__)


@blueprint.after_request
async def name_request(response: Response) -> Response:
    """Tell the id of the request under the name that Anthropic's clients look for."""
    response.headers["request-id"] = current_request_id()
    return response


@blueprint.post("/v1/messages")
@takes(MessagesRequest)
async def messages() -> Response:
    """Answer a chat, at once or as a stream."""
    wanted = MessagesRequest.parse(await read_chat())
    server = current_server()
    options, terms = await options_for(server, wanted), terms_of(wanted)
    opened = server.stream_chat(
        wanted.prompt.messages, options, **wanted.chat_arguments(), **terms.arguments()
    )
    blocks = Blocks(show_thinking=wanted.prompt.thinking.shown)
    if not wanted.stream:
        async with opened as stream:
            head = Head(server.info.name, len(stream.prompt))
            return json_response(await whole_message(stream, head, blocks))
    request = current_request()
    stream = await request.resources.enter_async_context(opened)
    request.sends(stream.mailbox)
    events = MessageEvents(Head(server.info.name, len(stream.prompt)), blocks)
    pings = pings_for(server, wanted, [stream])
    return await sse.respond(request, sse.feed_of(stream), events, last_event, pings)


@blueprint.post("/v1/messages/count_tokens")
@takes(CountTokensRequest)
async def count_tokens() -> Response:
    """Count the tokens of a prompt, and generate nothing."""
    wanted = CountTokensRequest.parse(await read_chat())
    server = current_server()
    text = await server.render(wanted.messages, **wanted.rendering())
    return json_response({"input_tokens": len(await server.tokenize_rendered(text))})
