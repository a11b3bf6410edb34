"""Anthropic's routes: ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.anthropic.events import (
    Blocks,
    Message,
    MessageEvents,
    MessageHead,
    whole_message,
)
from trioserve.api.anthropic.request import CountTokensRequest, MessagesRequest
from trioserve.api.base.answers import InputTokens
from trioserve.api.base.generation import (
    admit,
    open_streams,
    read_chat,
    respond_stream,
)
from trioserve.api.base.http import current_request_id, json_response
from trioserve.api.base.output import name_of
from trioserve.api.base.service import awake_server
from trioserve.api.openapi import gives, takes

blueprint = Blueprint("anthropic", __name__)


@blueprint.after_request
async def name_request(response: Response) -> Response:
    """Add the id of the request in the header that Anthropic's clients read."""
    response.headers["request-id"] = current_request_id()
    return response


@blueprint.post("/v1/messages")
@takes(MessagesRequest)
@gives(Message)
async def messages() -> Response:
    """Answer a chat, at once or as a stream."""
    request = await read_chat(MessagesRequest.parse)
    server, params, context = await admit(request)
    (stream,) = await open_streams(
        server.stream_chats(request.messages, params, request.chat_params, context=context)
    )
    head = MessageHead(name_of(server, request, params), len(stream.prompt))
    blocks = Blocks(show_thinking=request.thinking is None or request.thinking.shown)
    if not request.stream:
        return json_response(await whole_message(stream, head, blocks))
    events = MessageEvents(head, blocks)
    return await respond_stream(server, request, [stream], events)


@blueprint.post("/v1/messages/count_tokens")
@takes(CountTokensRequest)
@gives(InputTokens)
async def count_tokens() -> Response:
    """Count the tokens of a prompt, without generating."""
    request = await read_chat(CountTokensRequest.parse)
    server = await awake_server(request.model)
    n_tokens = len(await server.chat_prompt(request.messages, request.chat_params))
    return json_response(InputTokens(n_tokens))
