"""Steps shared by all routes that generate: from the request's body to the response's streams."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

import attrs
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import errors, sse
from trioserve.api.base.app_state import Running
from trioserve.api.base.body import read_body_as
from trioserve.api.base.chat_request import RUN_TOOLS, ChatRequest, RunToolsOptions
from trioserve.api.base.connection import current_request
from trioserve.api.base.generation_request import GenerationRequest
from trioserve.api.base.http import current_context, json_response
from trioserve.api.base.service import (
    awake_server,
    current_responses,
    current_service,
    keep_awake,
    server_for,
)
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.fair_limiter import offload
from trioserve.server import RequestContext
from trioserve.server.dispatch import Mailbox
from trioserve.server.generation.text import check_copies
from trioserve.server.prompts.infill import Gap, missing_tokens
from trioserve.server.prompts.media import MixedPrompt
from trioserve.server.prompts.text import AnyPrompt, PromptLike
from trioserve.server.runs.params import tools_of
from trioserve.server.server import Server
from trioserve.server.stream import ChatStream, Stream
from trioserve.tools.registry import select
from trioserve.tools.tool import Tool
from trioserve.types import GenerationParams
from trioserve.types.params import changed

_R = TypeVar("_R")
_S = TypeVar("_S", Stream, ChatStream)


async def admit(request: GenerationRequest) -> tuple[Server, GenerationParams, RequestContext]:
    """Find the server of a request, and make its parameters and its context.

    The server is awake until the request has been answered.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
        NotSupportedError: the server generates no text.
        RateLimitError: the client has no request left in this minute.
        TrioServeError: there is no server.
    """
    server = server_for(request.model)
    if request.n_copies != request.n:
        check_copies(request.n_copies, server.model.n_slots, param="best_of")
    given, limit = request.given_params(), server.config.max_logprobs
    n_probs, asked = request.asked_probs
    if request.has_max_logprobs and n_probs > limit:
        if asked is not None:
            raise InvalidRequestError.at(
                asked, f"must be at most {limit}, which --max-logprobs sets."
            )
        given["n_probs"] = limit
    if (given.get("prompt_logprobs") or 0) > limit:
        raise InvalidRequestError.at(
            "prompt_logprobs", f"must be at most {limit}, which --max-logprobs sets."
        )
    # First, so that an invalid request neither counts nor wakes the model.
    context = current_context(request.timeout, request.keep_alive)
    params = await server.params(given, n=request.n_copies, context=context)
    await keep_awake(server, context)
    adapter = server.adapters.named(request.model) if server.adapters.possible else None
    if adapter is not None:
        if request.lora:
            raise InvalidRequestError.at("lora", "and the name of an adapter exclude each other.")
        chosen = server.adapters.choose(adapter)
        params = changed(params, {"lora": chosen})
    return server, params, context


async def read_chat(parse: Callable[[dict[str, Any]], _R]) -> _R:
    """Read the body of a chat, and parse it. Its final message may be the assistant's, to continue.

    Where the configuration does not want that, it has to be asked for.

    Raises:
        InvalidRequestError: it is not a JSON object; or from `parse`.
    """
    continues = current_service().config.prefill_assistant

    def parse_chat(body: dict[str, Any]) -> _R:
        if not continues and body.get("continue_final_message") is None:
            body["continue_final_message"] = False
        return parse(body)

    return await read_body_as(parse_chat)


async def gap_prompt(
    server: Server, prefix: AnyPrompt, suffix: str, params: GenerationParams
) -> PromptLike:
    """Make the prompt that fills the gap between two texts, for a field that is called `suffix`.

    Raises:
        InvalidRequestError: the model cannot fill gaps, or there are media in the prefix.
    """
    if isinstance(prefix, MixedPrompt):
        raise InvalidRequestError.at("suffix", "and media exclude each other.")
    if missing := missing_tokens(server.model.vocab):
        raise InvalidRequestError.at(
            "suffix", f"needs a model that fills gaps, and this one does not: {missing}."
        )
    gap = Gap(prefix=prefix, suffix=suffix)
    return await server.infill.prompt_for(gap, params.max_tokens)


def check_pools(server: Server) -> None:
    """Check that a server makes a vector of each text.

    Raises:
        InvalidRequestError: it makes one of each token.
        NotSupportedError: it makes none.
    """
    server.model.check_embeds()
    if server.model.pooling == "none":
        raise InvalidRequestError(
            "This server makes a vector of each token, because its pooling is 'none', and this "
            "route has one for each text. POST /embeddings gives them."
        )


async def open_streams(streams: AbstractAsyncContextManager[list[_S]]) -> list[_S]:
    """Open streams, and close them no later than the end of the current request.

    Raises:
        TrioServeError: one of them cannot run.
    """
    return await current_request().resources.enter_async_context(streams)


def pings_of(server: Server, request: GenerationRequest, mailboxes: Sequence[Mailbox]) -> sse.Pings:
    """Say what is sent of a request while its streams, which have these mailboxes, are silent."""
    interval = request.sse_ping_interval
    if interval is None:
        interval = server.config.sse_ping_interval
    return sse.Pings(
        interval if interval > 0 else math.inf,
        server.queue,
        mailboxes,
        tell_place=request.queue_comments,
    )


async def respond_stream(
    server: Server,
    request: GenerationRequest,
    streams: Sequence[Stream | ChatStream],
    writer: sse.EventWriter[sse.Event],
    on_error: sse.OnError | None = None,
    *,
    id_: str = "",
) -> Response:
    """Make the response that sends streams of the current request. See `sse.respond`.

    Other requests find it by the `id_` in its chunks, if it has one.
    """
    current = current_request()
    if id_ and isinstance(request, ChatRequest):
        chats = [each for each in streams if isinstance(each, ChatStream)]
        running = Running(chats, current.api_key, request.reasoning_control)
        current.resources.enter_context(current_responses().running(id_, running))
    return await sse.respond(
        current,
        await sse.open_source(current.resources, streams),
        writer,
        pings_of(server, request, [stream.mailbox for stream in streams]),
        on_error or partial(errors.last_event_on, current.path),
        tells_start=request.return_progress,
    )


async def counted_tokens(request: ChatRequest) -> Response:
    """Make the response with the number of tokens in the prompt of a chat."""
    server = await awake_server(request.model)
    chat = request.chat_params
    if request.run_tools is not None:
        run = [tool.info.definition for tool in await tools_to_run(server, request.run_tools)]
        chat = attrs.evolve(chat, tools=[*request.tools, *run])
    n_tokens = len(await server.chat_prompt(request.messages, chat))
    return json_response({"input_tokens": n_tokens, "object": "response.input_tokens"})


#: Tools times patterns that are compared on the event loop.
_FEW_PAIRS = 256


async def tools_to_run(server: Server, asked: RunToolsOptions) -> Sequence[Tool]:
    """The tools that a request has the server run.

    Raises:
        UnsupportedFieldError: the server has none at all.
        InvalidRequestError: it has none of a name.
    """
    if not server.config.has_tools:
        raise UnsupportedFieldError.at(
            RUN_TOOLS,
            "needs a server with tools: one that was started with --tools, --agent, "
            "--mcp-servers-config or --mcp-servers-json.",
        )
    tools = server.tools.tools
    if asked.tools is None:
        return tools_of(None, server.tools, server.model.n_ctx_seq) if tools else []
    n_pairs = len(tools) * len(asked.tools)
    try:
        return [*(await offload(partial(select, tools, asked.tools), n_pairs, _FEW_PAIRS)).values()]
    except InvalidRequestError as error:
        error.param = f"{RUN_TOOLS}.tools"
        raise
