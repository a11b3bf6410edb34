"""Steps shared by all routes that generate: from the request's body to the response's streams.

Other requests of a client can reach or end a response that is being sent: see `Responses`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.api.base import errors, reply, sse
from trioserve.api.base.answers import InputTokens
from trioserve.api.base.caller import Caller
from trioserve.api.base.chat_request import RUN_TOOLS, ChatRequest, RunToolsOptions
from trioserve.api.base.generation_request import GenerationRequest
from trioserve.api.base.web import NO_TOOLS, HostedTools
from trioserve.errors import InvalidRequestError, UnknownToolCallError, UnsupportedFieldError
from trioserve.fair_limiter import offload
from trioserve.server import RequestContext
from trioserve.server.compaction import CompactedChat
from trioserve.server.dispatch import Mailbox
from trioserve.server.model_server import ModelServer
from trioserve.server.prompts.infill import Gap, missing_tokens
from trioserve.server.prompts.media import MixedPrompt
from trioserve.server.prompts.text import AnyPrompt, PromptLike
from trioserve.server.runs.params import tools_of
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import ChatStream, Stream
from trioserve.tools.registry import select
from trioserve.tools.tool import Tool
from trioserve.types import GenerationParams, Prompt
from trioserve.types.params import changed

if TYPE_CHECKING:
    from trioserve.api.base.models import Models


async def admit(
    request: GenerationRequest, caller: Caller, models: Models
) -> tuple[ModelServer, GenerationParams, RequestContext]:
    """Find the server of a request, and make its parameters and its context.

    The server is awake until the request has been answered.

    Raises:
        InvalidRequestError: a value is out of range; `param` names the field.
        NotSupportedError: the server generates no text.
        RateLimitError: the client has no request left in this minute.
        TrioServeError: no server has the model.
    """
    server = await models.use(request.model, caller)
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
    context = await caller.counted(server, request.timeout, request.keep_alive)
    params = await server.params(given, n=request.n_copies, context=context)
    await caller.keep_awake(server, context)
    adapter = server.adapters.named(request.model) if server.adapters.possible else None
    if adapter is not None:
        if request.lora:
            raise InvalidRequestError.at("lora", "and the name of an adapter exclude each other.")
        chosen = server.adapters.choose(adapter)
        params = changed(params, {"lora": chosen})
    return server, params, context


async def gap_prompt(
    server: ModelServer, prefix: AnyPrompt, suffix: str, params: GenerationParams
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
    gap = Gap(prefix=prefix.tokens if isinstance(prefix, Prompt) else prefix, suffix=suffix)
    return await server.prompt_for(gap, params.max_tokens)


def pings_of(
    server: ModelServer, request: GenerationRequest, mailboxes: Sequence[Mailbox]
) -> reply.Pings:
    """Say what is sent of a request while its streams, which have these mailboxes, are silent."""
    interval = request.sse_ping_interval
    if interval is None:
        interval = server.config.sse_ping_interval
    return reply.Pings(
        interval if interval > 0 else math.inf,
        server.queue,
        mailboxes,
        tell_place=request.queue_comments,
    )


async def stream_reply(
    server: ModelServer,
    request: GenerationRequest,
    caller: Caller,
    streams: Sequence[Stream | ChatStream],
    writer: sse.EventWriter[sse.Event],
    on_error: reply.OnError | None = None,
) -> reply.Stream[sse.Event]:
    """Answer with the events of streams. See `reply.stream`."""
    source = await reply.open_source(caller, streams)
    return await source_reply(server, request, caller, source, streams, writer, on_error)


async def source_reply(
    server: ModelServer,
    request: GenerationRequest,
    caller: Caller,
    source: reply.EventSource[Any],
    streams: Sequence[Stream | ChatStream],
    writer: sse.EventWriter[Any],
    on_error: reply.OnError | None = None,
) -> reply.Stream[Any]:
    """Answer with events that come of streams. See `reply.stream`."""
    return await reply.stream(
        source,
        writer,
        pings_of(server, request, [stream.mailbox for stream in streams]),
        on_error or partial(errors.last_event, caller.path),
        tells_start=request.return_progress,
    )


async def run_reply(
    server: ModelServer,
    request: GenerationRequest,
    caller: Caller,
    run: AgentRun | CompactedChat,
    writer: sse.EventWriter[Any],
    on_error: reply.OnError | None = None,
    streams: list[ChatStream] | None = None,
) -> reply.Stream[Any]:
    """Answer with the events of a run, or of a chat that is compacted first. See `reply.stream`.

    `streams` gets that of each step.
    """
    mailboxes: list[Mailbox] = []

    def follow(stream: ChatStream) -> None:
        mailboxes[:] = [stream.mailbox]
        if streams is not None:
            streams[:] = [stream]

    if isinstance(run, AgentRun):
        run.watch(follow)
    else:
        mailboxes = run.mailboxes
    pings = pings_of(server, request, mailboxes)
    source: reply.EventSource[Any] = reply.EventSource.of(run.__anext__)
    return await reply.stream(
        source, writer, pings, on_error or partial(errors.last_event, caller.path)
    )


async def counted_tokens(
    request: ChatRequest, caller: Caller, models: Models, hosted: HostedTools = NO_TOOLS
) -> reply.Json:
    """Answer with the number of tokens in the prompt of a chat."""
    server = await models.use(request.model, caller)
    await caller.keep_awake(server)
    chat, run = request.chat_params, hosted.offered(server)
    if request.run_tools is not None:
        run += await tools_to_run(server, request.run_tools)
    if run:
        chat = attrs.evolve(chat, tools=[*request.tools, *(tool.info.definition for tool in run)])
    n_tokens = len(await server.chat_prompt(request.messages, chat))
    return reply.json(InputTokens(n_tokens, "response.input_tokens"))


#: Tools times patterns that are compared on the event loop.
_FEW_PAIRS = 256


async def tools_to_run(server: ModelServer, asked: RunToolsOptions) -> Sequence[Tool]:
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


# -- responses that are being sent


#: The message for the id of a completion that is not running here.
NOT_RUNNING = "no active completion for this id"


@attrs.frozen(eq=False)
class Running:
    """A response that is being sent."""

    streams: Sequence[ChatStream]  # of a run: that of its step
    client: str  # who may find it
    reasoning_control: bool  # whether the request allows that its reasoning is ended
    run: AgentRun | None = None  # what it is the answer of, if the server runs tools for it

    @property
    def live(self) -> list[ChatStream]:
        """The streams that have not ended."""
        return [stream for stream in self.streams if not stream.mailbox.is_over]

    @property
    def has_ended(self) -> bool:
        """True once all of it has ended. A run may be between two streams."""
        return not self.live if self.run is None else self.run.is_over

    def cancel(self) -> None:
        """End it; its reader gets a `RequestEndedError`."""
        if self.run is not None:
            self.run.cancel()
            return
        for stream in self.live:
            stream.cancel()


def is_unknown(status: int, body: bytes) -> bool:
    """Read from an answer about a response that the server does not send it.

    `body` is JSON. A response whose calls of tools do not include the one in question is known.
    """
    told = json.loads(body)
    if status == 404:
        return bool(told["error"].get("code") != UnknownToolCallError.code)
    return status == 200 and bool(told.get("message") == NOT_RUNNING)


class Responses(dict[str, Running]):
    """The responses of an app, by id."""

    def add(
        self,
        id_: str,
        request: ChatRequest,
        caller: Caller,
        streams: Sequence[ChatStream],
        run: AgentRun | None = None,
    ) -> None:
        """Have its client find an answer by the id in the chunks, until it has been sent."""
        self[id_] = Running(streams, caller.api_key, request.reasoning_control, run)
        caller.resources.callback(self.pop, id_)

    def find(self, id_: str, client: str) -> Running | None:
        """Find a response that is being sent, unless it is another client's."""
        found = self.get(id_)
        return found if found is not None and found.client == client else None
