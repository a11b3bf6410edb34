"""Anthropic's routes: ``/v1/messages`` and ``/v1/messages/count_tokens``."""

from __future__ import annotations

from trioserve.api.anthropic.events import (
    Blocks,
    Message,
    MessageEvents,
    MessageHead,
    whole_message,
)
from trioserve.api.anthropic.request import CountTokensRequest, MessagesRequest
from trioserve.api.base.answers import InputTokens
from trioserve.api.base.caller import Caller
from trioserve.api.base.generation import admit, stream_reply
from trioserve.api.base.models import Models
from trioserve.api.base.output import name_of
from trioserve.api.base.reply import Reply, json
from trioserve.api.base.routes import Routes
from trioserve.api.openapi import gives, takes

routes = Routes(of_model=True)


@routes.post("/v1/messages")
@takes(MessagesRequest)
@gives(Message)
async def messages(request: MessagesRequest, caller: Caller, models: Models) -> Reply:
    """Answer a chat, at once or as a stream."""
    server, params, context = await admit(request, caller, models)
    (stream,) = await caller.open(
        server.stream_chats(request.messages, params, request.chat_params, context=context)
    )
    head = MessageHead(name_of(server, request, params), len(stream.prompt))
    blocks = Blocks(show_thinking=request.thinking is None or request.thinking.shown)
    if not request.stream:
        return json(await whole_message(stream, head, blocks))
    events = MessageEvents(head, blocks)
    return await stream_reply(server, request, caller, [stream], events)


@routes.post("/v1/messages/count_tokens")
@takes(CountTokensRequest)
@gives(InputTokens)
async def count_tokens(request: CountTokensRequest, caller: Caller, models: Models) -> Reply:
    """Count the tokens of a prompt, without generating."""
    server = models.use(request.model, caller)
    await caller.keep_awake(server)
    n_tokens = len(await server.chat_prompt(request.messages, request.chat_params))
    return json(InputTokens(n_tokens))
