"""Anthropic's routes, and how messages are written: as blocks, streamed or whole; and errors.

Both kinds of messages are made of the same events, so they are equal. A block begins, grows, and
ends before the next one begins. Errors are
``{"type": "error", "error": {"type", "message"}, "request_id"}``; the statuses are those of all
routes.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs
from msgspec import UNSET, UnsetType

from trioserve.api.anthropic.client_tools import Member
from trioserve.api.anthropic.context import AppliedEdit, Context
from trioserve.api.anthropic.messages import SERVER_CALL, sign
from trioserve.api.anthropic.request import CountTokensRequest, MessagesRequest
from trioserve.api.anthropic.web_results import citation, result
from trioserve.api.base import sse
from trioserve.api.base.answers import Answer, InputTokens
from trioserve.api.base.caller import Caller
from trioserve.api.base.cut_json import read_arguments
from trioserve.api.base.described import ModelInfo, ModelPage
from trioserve.api.base.errors import message_of
from trioserve.api.base.generation import admit, run_reply, stream_reply
from trioserve.api.base.models import Models
from trioserve.api.base.output import name_of
from trioserve.api.base.reply import Reply, json
from trioserve.api.base.routes import Query, Routes
from trioserve.api.base.vendors import ErrorShape
from trioserve.api.base.web import Sources
from trioserve.api.openapi import gives, takes
from trioserve.chat.compaction import Compaction
from trioserve.chat.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from trioserve.errors import ContextLengthExceededError, ThreadsUnsupportedError, TrioServeError
from trioserve.server.compaction import (
    Compacted,
    CompactedChat,
    CompactedEvent,
    limit_of,
    stream_compacted,
)
from trioserve.server.runs.events import (
    RunAnswer,
    RunEnded,
    RunEvent,
    StepChunk,
    StepStarted,
    ToolReturned,
)
from trioserve.server.runs.params import RunParams
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import ChatChunk, ChatStream
from trioserve.tools.web.tools import FETCH, SEARCH
from trioserve.types import Finished, FinishReason, Progress

# -- errors


_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class _AnthropicProblem(Answer):
    type: str
    message: str


class AnthropicError(Answer):
    """The body of an error."""

    error: _AnthropicProblem
    request_id: str
    type: Literal["error"] = "error"


def body(error: TrioServeError, request_id: str) -> dict[str, Any]:
    """Make the JSON body of an error."""
    other = "invalid_request_error" if 400 <= error.status < 500 else "api_error"
    kind = _TYPES.get(error.status, other)
    told: dict[str, Any] = {"type": kind, "message": message_of(error, request_id)}
    if isinstance(error, ContextLengthExceededError):  # clients that compact look for these words
        told["message"] = (
            f"prompt is too long: {error.n_prompt_tokens} tokens > {error.n_ctx} maximum"
        )
    if isinstance(error, ThreadsUnsupportedError):  # tool runners then use none
        told["details"] = {"error_code": error.code, "unsupported": [error.param]}
    return {"type": "error", "error": told, "request_id": request_id}


def event(written: Mapping[str, Any], n_before: int = 0) -> bytes:
    """Write the body of an error as the last event of a stream."""
    return b"event: error\n" + sse.event(written)


SHAPE = ErrorShape(body, AnthropicError, event)


# -- blocks and messages


class _Caller(Answer):
    type: str


class ContentBlock(Answer, kw_only=True):
    """A part of a message, with the fields of its type."""

    type: Literal[
        "text", "thinking", "tool_use", "server_tool_use", "web_search_tool_result",
        "web_fetch_tool_result", "compaction",
    ]  # fmt: skip
    content: str | list[dict[str, Any]] | dict[str, Any] | UnsetType | None = UNSET
    encrypted_content: str | UnsetType | None = UNSET
    tool_changes: list[dict[str, Any]] | UnsetType = UNSET
    text: str | UnsetType = UNSET
    citations: list[dict[str, Any]] | UnsetType | None = UNSET
    thinking: str | UnsetType = UNSET
    signature: str | UnsetType = UNSET
    id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    toolset_name: str | UnsetType = UNSET
    input: dict[str, Any] | UnsetType = UNSET
    caller: _Caller | UnsetType = UNSET
    tool_use_id: str | UnsetType = UNSET


class _ServerToolUse(Answer):
    web_search_requests: int
    web_fetch_requests: int


class _Iteration(Answer, kw_only=True):
    """The tokens of a compaction, which those of the message do not include, or of the message."""

    type: Literal["message", "compaction"]
    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    cache_creation: None = None
    output_tokens: int


class _MessageUsage(Answer, kw_only=True):
    """The tokens of a message. What the cache keeps of a prompt costs nothing extra."""

    input_tokens: int
    iterations: list[_Iteration] | UnsetType = UNSET
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    cache_creation: None = None
    output_tokens: int
    output_tokens_details: None = None
    server_tool_use: _ServerToolUse | None = None
    inference_geo: None = None
    service_tier: str = "standard"


class _ContextManagement(Answer):
    applied_edits: list[AppliedEdit]


class _Ending(Answer):
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None


class Message(Answer, kw_only=True):
    """A message of the model."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: Sequence[ContentBlock]
    stop_reason: str | None = None
    stop_sequence: str | None = None
    stop_details: None = None
    container: None = None
    usage: _MessageUsage
    context_management: _ContextManagement | UnsetType = UNSET


#: One of Anthropic's events, as JSON.
Event: TypeAlias = dict[str, Any]


class Blocks:
    """Turns the events of a chat, or of a run, into those of content blocks; and counts tokens.

    Args:
        n_prompt: the tokens of the prompt.
        tool_changes: the blocks of the conversation that add or remove a tool.
        show_thinking: whether the text of thinking is part of its block. Where it is not, the
            signature carries it, and is read when the block comes back.
        members: the functions that are members of toolsets, by their names.
        hosted: the names of the tools that the server runs.
    """

    def __init__(
        self,
        n_prompt: int,
        tool_changes: Sequence[Mapping[str, Any]],
        *,
        show_thinking: bool,
        members: Mapping[str, Member],
        hosted: Collection[str] = (),
    ) -> None:
        self._n_prompt, self._tool_changes = n_prompt, tool_changes
        self._compacted: Compacted | None = None
        self._show_thinking, self._members = show_thinking, members
        self._hosted = dict.fromkeys(hosted, 0)  # how often each was called
        self._sources = Sources()
        self._text: list[str] = []  # of the open block
        self._called = False  # a tool of the client
        self._index = -1
        self._open = ""  # the type of the block that grows
        self._hidden: list[str] = []

    def take(self, event: MessageEvent) -> list[Event]:
        """Return the events that an event of a chat, or of a run, adds to the stream."""
        match event:
            case StepChunk():
                return self.take(event.chunk)
            case ChatChunk():
                return [each for delta in event.deltas for each in self.feed(delta)]
            case StepStarted():
                return self.end()
            case ToolReturned():
                return [*self._begin(result(event, self._sources.add(event))), *self.end()]
            case Compacted():
                self._n_prompt, self._compacted = event.n_prompt, event
                return self._summary(event.compaction)
        return []

    def feed(self, delta: Delta) -> list[Event]:
        """Return the events that a delta adds to the stream."""
        match delta:
            case ContentDelta(text):
                self._text += [text] if self._hosted else []
                begun = self._begin_unless_open({"type": "text", "text": "", "citations": None})
                return [*begun, self._grow({"type": "text_delta", "text": text})]
            case ReasoningDelta(text):
                begin = {"type": "thinking", "thinking": "", "signature": ""}
                begun = self._begin_unless_open(begin)
                if self._show_thinking:
                    return [*begun, self._grow({"type": "thinking_delta", "thinking": text})]
                self._hidden.append(text)
                return begun
            case ToolCallStart(_, id_, name):
                called = {"type": "tool_use", "id": id_, "name": name, "input": {}}
                if name in self._hosted:
                    self._hosted[name] += 1
                    called |= {"type": "server_tool_use", "id": f"{SERVER_CALL}{id_}"}
                else:
                    self._called = True
                if (member := self._members.get(name)) is not None:
                    called |= {"name": member.name, "toolset_name": member.toolset}
                return self._begin({**called, "caller": {"type": "direct"}})
            case ToolCallArguments(_, text):
                assert self._open in ("tool_use", "server_tool_use")
                return [self._grow({"type": "input_json_delta", "partial_json": text})]

    def _summary(self, compaction: Compaction | None) -> list[Event]:
        """Write a compaction: what it keeps beside the summary is sealed. None: it has failed."""
        block: dict[str, Any] = {"type": "compaction", "content": None, "encrypted_content": None}
        if compaction is None:
            return self._begin(block)
        sealed = attrs.evolve(compaction, summary="").written() if compaction.kept else None
        if self._tool_changes:
            block["tool_changes"] = [*self._tool_changes]
        begun = self._begin(block)
        grown = {"content": compaction.summary, "encrypted_content": sealed}
        return [*begun, self._grow({"type": "compaction_delta", **grown})]

    def end(self) -> list[Event]:
        """End the block that is open, if one is."""
        if not self._open:
            return []
        events = [{"type": "content_block_stop", "index": self._index}]
        if self._open == "thinking":
            signature = sign("".join(self._hidden), shown=self._show_thinking)
            events.insert(0, self._grow({"type": "signature_delta", "signature": signature}))
            self._hidden.clear()
        elif self._text:
            events[:0] = [
                self._grow({"type": "citations_delta", "citation": citation(source)})
                for _, _, source in self._sources.cited("".join(self._text))
            ]
            self._text.clear()
        self._open = ""
        return events

    def usage(self, n_cached: int, n_output: int, *, is_end: bool = True) -> _MessageUsage:
        """Count tokens, those of a prompt that are cached only once."""
        tokens: dict[str, Any] = {
            "input_tokens": self._n_prompt - n_cached,
            "cache_read_input_tokens": n_cached,
            "output_tokens": n_output,
        }
        if self._compacted is None:
            tools = None
            if self._hosted and is_end:
                tools = _ServerToolUse(self._hosted.get(SEARCH, 0), self._hosted.get(FETCH, 0))
            return _MessageUsage(**tokens, server_tool_use=tools)
        of_summary = self._compacted.timings
        first = _Iteration(
            type="compaction",
            input_tokens=of_summary.prompt_n,
            cache_read_input_tokens=of_summary.cache_n,
            output_tokens=of_summary.predicted_n,
        )
        if self._compacted.is_all:
            return _MessageUsage(**(tokens | dict.fromkeys(tokens, 0)), iterations=[first])
        return _MessageUsage(**tokens, iterations=[first, _Iteration(type="message", **tokens)])

    def ended(self, last: Finished | RunAnswer) -> tuple[_Ending, _MessageUsage]:
        """Write how the message ended, and the usage: of a run, the prompt of its last step."""
        if self._compacted is not None and self._compacted.is_all:
            return _Ending("compaction"), self.usage(0, 0)
        finished, timings = last, last.timings
        if isinstance(last, RunAnswer):
            self._n_prompt = len(last.prompt)
            finished, timings = last.finished, last.counted
        assert isinstance(finished, Finished)
        reason = "tool_use" if self._called else "end_turn"
        if isinstance(last, RunAnswer) and last.reason == "max_steps":
            reason = "pause_turn"
        elif finished.reason is FinishReason.WORD:
            reason = "stop_sequence"
        elif finished.reason is FinishReason.LIMIT:
            reason = "model_context_window_exceeded" if finished.truncated else "max_tokens"
        ending = _Ending(reason, finished.stopping_word or None)
        return ending, self.usage(timings.cache_n, timings.predicted_n)

    def _begin_unless_open(self, block: dict[str, Any]) -> list[Event]:
        return [] if self._open == block["type"] else self._begin(block)

    def _begin(self, block: dict[str, Any]) -> list[Event]:
        ended = self.end()
        self._index += 1
        self._open = block["type"]
        begun = {"type": "content_block_start", "index": self._index, "content_block": block}
        return [*ended, begun]

    def _grow(self, delta: dict[str, Any]) -> Event:
        return {"type": "content_block_delta", "index": self._index, "delta": delta}


def content_of(events: Iterable[Event]) -> list[ContentBlock]:
    """Accumulate the events of content blocks, as clients do."""
    blocks: list[dict[str, Any]] = []
    grown: list[list[str]] = []
    for event in events:
        if event["type"] == "content_block_start":
            blocks.append(dict(event["content_block"]))
            grown.append([])
        elif event["type"] == "content_block_delta":
            kind, piece, *sealed = event["delta"].values()
            if kind == "signature_delta":
                blocks[-1]["signature"] = piece
            elif kind == "compaction_delta":
                blocks[-1] |= {"content": piece, "encrypted_content": sealed[0]}
            elif kind == "citations_delta":
                blocks[-1]["citations"] = [*(blocks[-1]["citations"] or ()), piece]
            else:
                grown[-1].append(piece)
    for block, parts in zip(blocks, grown, strict=True):
        text = "".join(parts)
        if "input" in block:
            block["input"] = read_arguments(text)
        elif block["type"] in ("text", "thinking"):
            block[block["type"]] = text
    return [ContentBlock(**block) for block in blocks]


# -- messages


@attrs.frozen
class MessageHead:
    """The fields of a message that are known before its content."""

    model: str
    managed: _ContextManagement | UnsetType
    id: str = attrs.field(factory=lambda: f"msg_{secrets.token_hex(16)}")

    def message(
        self, usage: _MessageUsage, content: Sequence[ContentBlock] = (), **end: Any
    ) -> Message:
        """The message, or how it begins."""
        return Message(id=self.id, model=self.model, content=content, usage=usage, **end)


async def whole_message(
    answer: ChatStream | AgentRun | CompactedChat, head: MessageHead, blocks: Blocks
) -> Message:
    """Read an answer to its end, and write all of the message.

    Raises:
        TrioServeError: the request failed.
    """
    events: list[Event] = []
    last: MessageEvent | RunAnswer | None = None
    async for event in answer:
        events += blocks.take(event)
        last = event
    events += blocks.end()
    content = content_of(events)
    if not isinstance(answer, CompactedChat):
        last = answer.finished if isinstance(answer, ChatStream) else answer.answer
    assert isinstance(last, Finished | RunAnswer)
    ending, usage = blocks.ended(last)
    return head.message(usage, content, **sse.fields_of(ending), context_management=head.managed)


#: An event that parts of a streamed message are written from.
MessageEvent: TypeAlias = sse.Event | CompactedEvent | RunEvent


class MessageEvents(sse.EventWriter[MessageEvent]):
    """Writes the events of a streamed message, from when the first part of its prompt is done."""

    def __init__(self, head: MessageHead, blocks: Blocks) -> None:
        self._head, self._blocks = head, blocks
        self._begun = False

    def encode(self, index: int, event: MessageEvent) -> bytes:
        if isinstance(event, StepChunk):
            event = event.chunk
        if isinstance(event, Progress):
            return b"" if self._begun else self._begin(event.cached)
        events = self._blocks.take(event)
        if isinstance(event, StepStarted) and not events:
            return b""  # the progress of its prompt comes first
        begin = b"" if self._begun else self._begin(0)
        if isinstance(event, Finished | RunEnded):
            return begin + self._last(event if isinstance(event, Finished) else event.answer)
        return begin + b"".join(map(_write, events))

    def _begin(self, n_cached: int) -> bytes:
        self._begun = True
        message = self._head.message(self._blocks.usage(n_cached, 0, is_end=False))
        return _write({"type": "message_start", "message": message}) + _write({"type": "ping"})

    def _last(self, last: Finished | RunAnswer) -> bytes:
        ended = self._blocks.end()
        ending, usage = self._blocks.ended(last)
        delta = {"type": "message_delta", "delta": ending, "usage": usage}
        if self._head.managed is not UNSET:
            delta["context_management"] = self._head.managed
        return b"".join(map(_write, [*ended, delta, {"type": "message_stop"}]))


def _write(event: Event) -> bytes:
    return f"event: {event['type']}\n".encode() + sse.event(event)


# -- the routes


routes = Routes(of_model=True)
of_models = Routes()

#: The header that all clients of this API send.
VERSION = "anthropic-version"


@routes.post("/v1/messages")
@takes(MessagesRequest)
@gives(Message)
async def messages(request: MessagesRequest, caller: Caller, models: Models) -> Reply:
    """Answer a chat, at once or as a stream."""
    server, params, context = await admit(request, caller, models)
    messages, chat, plan = request.messages, request.chat_params, None
    managed: _ContextManagement | UnsetType = UNSET
    if request.compaction is not None:
        plan = request.compaction.plan(limit_of(server, params))
    elif request.edits is not None:
        edited = await Context.of(request.edits, server, messages, params, chat)
        messages, plan, managed = edited.messages, edited.plan, _ContextManagement(edited.applied)
    tools = request.offer.hosted.offered(server)
    if plan is not None:
        tools = []
    if not tools:
        chat = request.offer.hosted.left_out_of(chat)
    answer: ChatStream | AgentRun | CompactedChat
    n_prompt = 0
    if plan is not None:
        answer = await caller.open(stream_compacted(server, messages, params, chat, plan, context))
    elif tools:
        chat, run = attrs.evolve(chat, parse_tools=True), RunParams(approve="none")
        opened = server.stream_run(
            messages, tools, params=params, chat=chat, run=run, context=context
        )
        answer = await caller.open(opened)
        n_prompt = 0 if answer.stream is None else len(answer.stream.prompt)
    else:
        (answer,) = await caller.open(server.stream_chats(messages, params, chat, context=context))
        n_prompt = len(answer.prompt)
    head = MessageHead(name_of(server, request, params), managed)
    blocks = Blocks(
        n_prompt,
        request.offer.changes,
        show_thinking=request.thinking is None or request.thinking.shown,
        members=request.offer.members,
        hosted=[tool.info.name for tool in tools],
    )
    if not request.stream:
        return json(await whole_message(answer, head, blocks))
    events = MessageEvents(head, blocks)
    if isinstance(answer, ChatStream):
        return await stream_reply(server, request, caller, [answer], events)
    return await run_reply(server, request, caller, answer, events)


@of_models.get("/v1/models", header=VERSION)
@gives(ModelPage)
async def listed(query: Query, caller: Caller, models: Models) -> Reply:
    """List the models in Anthropic's form."""
    return json(ModelPage.of(await models.listed(caller)))


@of_models.get("/v1/models/<path:name>", header=VERSION)
@gives(ModelInfo)
async def described(query: Query, caller: Caller, models: Models, name: str) -> Reply:
    """Describe a model in Anthropic's form."""
    return json(ModelInfo.of(await models.describe(name, caller)))


@routes.post("/v1/messages/count_tokens")
@takes(CountTokensRequest)
@gives(InputTokens)
async def count_tokens(request: CountTokensRequest, caller: Caller, models: Models) -> Reply:
    """Count the tokens of a prompt, without generating."""
    server = await models.use(request.model, caller)
    await caller.keep_awake(server)
    messages, chat = request.messages, request.chat_params
    if tools := request.offer.hosted.offered(server):
        more = [tool.info.definition for tool in tools]
        chat = attrs.evolve(chat, tools=[*request.offer.tools, *more], parse_tools=True)
    n_tokens = len(await server.chat_prompt(messages, chat))
    if not request.edits:
        return json(InputTokens(n_tokens))
    edited = await Context.of(request.edits, server, messages, await server.params({}), chat)
    n_left = len(await server.chat_prompt(edited.messages, chat))
    return json(InputTokens.edited(n_left, n_tokens))
