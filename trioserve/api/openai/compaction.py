"""Compaction of chats: ``/v1/chat/completions/compact``, for clients that keep messages."""

from __future__ import annotations

from typing import Any, Literal

import attrs

from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.chat_request import RUN_TOOLS, ChatRequest
from trioserve.api.base.generation import admit
from trioserve.api.base.models import Models
from trioserve.api.base.reply import Reply, long_json
from trioserve.api.base.routes import Routes
from trioserve.api.base.usage import Usage, usage_of
from trioserve.api.openapi import gives, takes
from trioserve.chat.compaction import written
from trioserve.errors import UnsupportedFieldError
from trioserve.server.compaction import Compacted, CompactionPlan, limit_of, stream_compacted

routes = Routes(of_model=True)


class CompactedMessages(Answer, kw_only=True):
    """A summary of a chat, and the messages to continue with."""

    object: Literal["chat.compaction"] = "chat.compaction"
    summary: str
    messages: list[dict[str, Any]]
    usage: Usage


@routes.post("/v1/chat/completions/compact", "/chat/completions/compact")
@takes(ChatRequest)
@gives(CompactedMessages)
async def compact(request: ChatRequest, caller: Caller, models: Models) -> Reply:
    """Compact a chat: give a summary, and the messages to continue with."""
    given = {"stream": request.stream, "n": request.n > 1, RUN_TOOLS: bool(request.run_tools)}
    for name in (name for name, is_given in given.items() if is_given):
        raise UnsupportedFieldError.at(name, "is not supported here; leave it out.")
    server, params, context = await admit(request, caller, models)
    plan = CompactionPlan(limit=limit_of(server, params), answers=False)
    chat = attrs.evolve(request.chat_params, continue_final_message=None)
    opened = stream_compacted(server, request.messages, params, chat, plan, context)
    found = [event async for event in await caller.open(opened) if isinstance(event, Compacted)]
    (compacted,) = found
    compaction = compacted.compaction
    assert compaction is not None, "a plan that may not fail"
    stays = [request.messages[i] for i in compaction.stays(request.messages)]
    answer = CompactedMessages(
        summary=compaction.summary,
        messages=written([*stays, *compaction.messages()]),
        usage=usage_of(compacted.n_prompt, [compacted.timings]),
    )
    return long_json(lambda: answer, caller.held.n_bytes // 32)
