"""Builds responses, and writes their streams and the errors in them.

A whole response and a streamed one are made by the same steps; without a stream, the events are
dropped. Where the server runs tools, their calls are items as OpenAI's own servers have them for
tools of MCP servers. What happens in a run is written as events of trioserve's own, too, with the
fields that they have in the chunks of a chat.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.base import errors, sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.output import LiveTimings, timings_of
from trioserve.api.base.reply import LONG
from trioserve.api.base.scores import TokenProbs as WrittenProbs, candidates_of
from trioserve.api.base.text_tokens import TokensOfText
from trioserve.api.base.vendors import ErrorShape
from trioserve.api.base.web import Sources
from trioserve.api.openai.events import event_fields
from trioserve.api.openai.responses.items import (
    CallItem,
    CompactionItem,
    Event,
    Item,
    MadeCallItem,
    MessageItem,
    ReasoningItem,
    WebCallItem,
    call_item,
    new_id,
)
from trioserve.api.openai.responses.request import ResponsesRequest
from trioserve.chat.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from trioserve.chat.template.continuation import final_message_deltas
from trioserve.errors import TrioServeError
from trioserve.fair_limiter import offload
from trioserve.log import request_id
from trioserve.server.compaction import Compacted, CompactedEvent, Compacting
from trioserve.server.runs.events import (
    EndReason,
    RunEnded,
    RunEvent,
    StepChunk,
    StepStarted,
    ToolCalled,
    ToolReturned,
)
from trioserve.server.stream import ChatChunk
from trioserve.types import Finished, FinishReason, GenerationParams, Progress, Timings, TokenProbs
from trioserve.types.events import Chunk

# -- errors


def as_event(body: Mapping[str, Any]) -> dict[str, Any]:
    """Make an event of the body of an error: flat, as the API has it, and as it is elsewhere."""
    error = body["error"]
    code = error["code"] if isinstance(error["code"], str) else error["type"]
    flat = {"code": code, "message": error["message"], "param": error["param"]}
    return {"type": "error", **flat, **body}


def event(body: Mapping[str, Any], n_before: int) -> bytes:
    """Write an error body as the last event of a stream, after `n_before` others."""
    numbered = {"type": "error", "sequence_number": n_before, **as_event(body)}
    return b"event: error\n" + sse.event(numbered)


SHAPE = ErrorShape(lambda error, request_id: errors.body(error), event=event)


# -- what a response is


class _Part(Answer):
    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: list[dict[str, Any]] | UnsetType = UNSET
    logprobs: list[WrittenProbs] | UnsetType = UNSET


class ResponseItem(Answer):
    """An item of any type. The types of calls have the fields of OpenAI's SDK."""

    is_open = True
    id: str
    type: str
    status: str
    role: str | UnsetType = UNSET
    content: list[_Part] | UnsetType = UNSET
    call_id: str | UnsetType = UNSET
    name: str | UnsetType = UNSET
    arguments: str | dict[str, Any] | UnsetType = UNSET
    input: str | UnsetType = UNSET
    action: dict[str, Any] | UnsetType = UNSET


class _ResponseError(Answer):
    code: str
    message: str


class _WhyIncomplete(Answer):
    reason: str


class _InputDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class _OutputDetails(Answer):
    reasoning_tokens: int


class _ResponseUsage(Answer):
    is_open = True
    input_tokens: int
    input_tokens_details: _InputDetails
    output_tokens: int
    output_tokens_details: _OutputDetails
    total_tokens: int


class _Conversation(Answer):
    id: str


class _Reasoning(Answer):
    effort: str | None
    summary: None


class Response(Answer, kw_only=True):
    """A response, as `ResponseBuilder` writes it; what can be missing, a queued one does not have,
    or one that is not stored.
    """

    id: str
    object: Literal["response"]
    created_at: int
    completed_at: int | None
    model: str
    status: str
    output: list[ResponseItem]
    error: _ResponseError | None
    incomplete_details: _WhyIncomplete | None
    usage: _ResponseUsage | None
    background: bool
    frequency_penalty: float | UnsetType = UNSET
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | UnsetType | None = UNSET
    metadata: dict[str, str] | None
    conversation: _Conversation | UnsetType | None = UNSET
    parallel_tool_calls: bool
    presence_penalty: float | UnsetType = UNSET
    previous_response_id: str | None
    prompt_cache_key: str | UnsetType | None = UNSET
    reasoning: _Reasoning | UnsetType = UNSET
    safety_identifier: str | UnsetType | None = UNSET
    service_tier: str | UnsetType = UNSET
    store: bool
    temperature: float | None
    text: dict[str, Any] | UnsetType = UNSET
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int | UnsetType = UNSET
    top_p: float | None
    truncation: str | UnsetType = UNSET
    user: str | None


class CompactedResponse(Answer, kw_only=True):
    """A conversation that was compacted: what the user has said last, and the compaction."""

    id: str
    object: Literal["response.compaction"] = "response.compaction"
    created_at: int
    output: list[dict[str, Any]]
    usage: _ResponseUsage

    @classmethod
    def of(cls, response: Mapping[str, Any], users: Sequence[Mapping[str, Any]]) -> Self:
        """Write what a response with a compaction came to, and messages of the user before it."""
        about = {name: response[name] for name in ("id", "created_at")}
        used = msgspec.convert(response["usage"], _ResponseUsage)
        return cls(output=[*map(_as_output, users), *response["output"]], usage=used, **about)


def _as_output(message: Mapping[str, Any]) -> dict[str, Any]:
    """Write a message of the input as an item of the output."""
    content = message["content"]
    if isinstance(content, str):
        content = [{"type": "input_text", "text": content}]
    about = {"type": "message", "id": new_id("msg"), "status": "completed"}
    return {**about, **message, "content": content}


#: The label of tools that are those of no MCP server.
_OWN = "trioserve"

#: Why a response is incomplete, by why its run has ended.
_CUT: Mapping[EndReason, str] = {"length": "max_output_tokens", "max_steps": "max_steps"}


def code_of(status: int) -> str:
    """The code of the error of a response that has failed, by the status of its error."""
    if status == 429:
        return "rate_limit_exceeded"
    return "invalid_prompt" if 400 <= status < 500 else "server_error"


class ResponseBuilder:
    """Turns the events of a chat into those of a response, and keeps the response as it is.

    Where the server runs tools, `labels` are the MCP servers that have them, by the names of the
    tools, and `web` names those of the web.
    """

    def __init__(
        self,
        model: str,
        request: ResponsesRequest,
        params: GenerationParams,
        n_prompt: int,
        labels: Mapping[str, str] | None = None,
        web: Collection[str] = (),
    ) -> None:
        self.chat, self._params = request.chat, params
        self.n_prompt = n_prompt
        self._tokens = TokensOfText()
        self._labels, self._web, self._include = labels, web, request.include
        self._sources = Sources()
        self._of_client = frozenset(request.chat.tool_names)
        self._offered = request.offer.tools
        self._calls: dict[str, MadeCallItem] = {}  # of the server, without a result, by their ids
        self._n_reasoning = 0
        self.n_candidates = 0
        self._step = None if labels is None else _new_step()  # its name, where there are several
        self._items: list[Item] = []
        self._written: dict[int, dict[str, Any]] = {}  # those that are closed, by their index
        self.repeated = _repeated(request, params) | {
            "tools": [*request.offer.given, *(request.hosted.given if web else ())],
            "id": request.stored.id or new_id("resp"),
            "object": "response",
            "created_at": int(time.time()),
            "model": model,
            **request.stored.repeated,
        }
        self.begun = False
        #: The usage of an inline compaction, beside that of the answer.
        self._compacted: dict[str, Any] = {}
        self.response = self._response("in_progress")

    def begin(self) -> list[Event]:
        """Return the events that begin the stream; none if they were returned before."""
        if self.begun:
            return []
        self.begun = True
        events: list[Event] = [
            {"type": "response.created", "response": self.response},
            {"type": "response.in_progress", "response": self.response},
        ]
        if self.chat.continuation.echo:
            events += self.add(ChatChunk(final_message_deltas(self.chat.messages), ()))
        return events

    def take(self, event: sse.Event | RunEvent | CompactedEvent) -> list[Event]:
        """Take the next event of a chat, or of a run of tools."""
        match event:
            case Compacting():
                self._items.append(CompactionItem(len(self._items)))
                return self._items[-1].opened()
            case Compacted():
                return self._compact(event)
            case ChatChunk():
                return self.add(event)
            case Finished():
                return self.finish(event)
            case StepChunk():
                return self.take(event.chunk)
            case Progress() | Chunk():
                return []
        if self.chat.run_tools is None:  # clients of the API alone do not know these
            return self._follow(event)
        fields = event_fields(event)
        told = {**fields, "type": f"response.trioserve_{fields['type']}"}
        return [told, *self._follow(event)]

    def _compact(self, event: Compacted) -> list[Event]:
        item, self.n_prompt = self._items[-1], event.n_prompt
        assert isinstance(item, CompactionItem)
        item.take(event.compaction)
        if not event.is_all:
            used = event.timings
            self._compacted = {"compaction": _usage(used, used.cache_n + used.prompt_n, 0)}
        return self._close_item(item, "incomplete" if event.compaction is None else "completed")

    def add(self, chunk: ChatChunk) -> list[Event]:
        """Take the next part of the message."""
        events: list[Event] = []
        self.n_candidates += sse.n_candidates(chunk.probs)
        for delta, n_tokens, probs in self._tokens.match(chunk):
            if isinstance(delta, ReasoningDelta):
                self._n_reasoning += n_tokens
            events += self._open_for(delta)
            if not isinstance(delta, ToolCallStart):
                events += self._items[-1].grown(delta.text, self._logprobs(probs))
        return events

    def finish(self, last: Finished) -> list[Event]:
        """Return the events that end the response."""
        cut = "max_output_tokens" if last.reason is FinishReason.LIMIT else None
        return self._end(cut, last.timings, self.n_prompt)

    def _end(self, cut: str | None, timings: Timings, n_prompt: int) -> list[Event]:
        """End the response; `cut` says why it is not complete."""
        status = "completed" if cut is None else "incomplete"
        events = self._close(status)
        self.response = self._response(
            status,
            incomplete_details=None if cut is None else {"reason": cut},
            completed_at=int(time.time()) if cut is None else None,
            usage=_usage(timings, n_prompt, self._n_reasoning) | self._compacted,
        )
        return [*events, {"type": f"response.{status}", "response": self.response}]

    def fail(self, error: TrioServeError) -> list[Event]:
        """Take an error in place of the end."""
        self._close("incomplete")
        message = errors.message_of(error, request_id())
        failed = {"code": code_of(error.status), "message": message}
        self.response = self._response("failed", error=failed)
        return [{"type": "response.failed", "response": self.response}]

    def _follow(self, event: RunEvent) -> list[Event]:
        """Follow a run with events of the API."""
        match event:
            case StepStarted(step=step) if step > 1:
                events = self._close("completed")
                self._tokens = TokensOfText()
                self._step = _new_step()
                return events
            case ToolCalled():
                return self._close("completed")
            case ToolReturned():
                item = self._calls.pop(event.call.id)
                item.take(event)
                self._sources.add(event)
                return self._close_item(item, "failed" if event.is_error else "completed")
            case RunEnded(answer=answer):
                return self._end(_CUT.get(answer.reason), answer.counted, len(answer.prompt))
        return []

    def _open_for(self, delta: Delta) -> list[Event]:
        """Make sure that the last item is one for a delta."""
        last = self._items[-1] if self._items else None
        match delta, last:
            case (
                (ContentDelta(), MessageItem())
                | (ReasoningDelta(), ReasoningItem())
                | (ToolCallArguments(), CallItem() | MadeCallItem())
            ):
                return []
        events = self._close("completed")
        item = self._item_for(delta, len(self._items))
        item.step = self._step
        self._items.append(item)
        return events + item.opened()

    def _item_for(self, delta: Delta, index: int) -> Item:
        match delta:
            case ContentDelta():
                return MessageItem(index, self._sources)
            case ReasoningDelta():
                return ReasoningItem(index)
            case ToolCallStart():
                if self._labels is None or delta.name in self._of_client:
                    return call_item(index, delta, self._offered.get(delta.name))
                if delta.name in self._web:
                    made: MadeCallItem = WebCallItem(index, delta, self._include)
                else:
                    made = MadeCallItem(index, delta, self._labels.get(delta.name) or _OWN)
                self._calls[delta.id] = made
                return made
            case _:
                raise AssertionError(f"{delta} belongs to no call")

    def _close(self, status: str) -> list[Event]:
        """Close the last item, if it is open.

        Calls of the server stay open until they have a result, unless none will come.
        """
        events: list[Event] = []
        last = self._items[-1] if self._items else None
        if isinstance(last, MadeCallItem):
            events += [] if last.is_called else last.called()
        elif last is not None and last.index not in self._written:
            events += self._close_item(last, status)
        if status == "incomplete":
            for item in self._calls.values():
                events += self._close_item(item, status)
            self._calls = {}
        return events

    def _close_item(self, item: Item, status: str) -> list[Event]:
        self._written[item.index] = item.as_json(status)
        return item.closed(status)

    def _logprobs(self, probs: list[TokenProbs]) -> list[dict[str, Any]]:
        if not probs:
            return []
        post = self._params.post_sampling_probs
        written = candidates_of(probs, post_sampling=post, n_top=self.chat.top_logprobs)
        found: list[dict[str, Any]] = msgspec.to_builtins(list(written))
        return found

    def _response(self, status: str, **fields: Any) -> dict[str, Any]:
        empty = dict.fromkeys(("completed_at", "error", "incomplete_details", "usage"))
        output = [self._written[index] for index in sorted(self._written)]
        return {**self.repeated, "status": status, "output": output, **empty, **fields}


def _usage(timings: Timings, n_prompt: int, n_reasoning: int) -> dict[str, Any]:
    """Count tokens. The store takes no objects."""
    read, n_output = _InputDetails(timings.cache_n, timings.prompt_n), timings.predicted_n
    details = _OutputDetails(n_reasoning)
    used = _ResponseUsage(n_prompt, read, n_output, details, n_prompt + n_output)
    written: dict[str, Any] = msgspec.to_builtins(used)
    return written


def _new_step() -> str:
    """Name a step. The name comes back with the items, and tells them from those of others."""
    return f"step_{secrets.token_hex(8)}"


def _repeated(request: ResponsesRequest, params: GenerationParams) -> dict[str, Any]:
    """The fields that repeat the request, and those that are always the same."""
    return {
        "background": False,
        "frequency_penalty": params.sampling.frequency_penalty,
        "instructions": request.instructions,
        "max_output_tokens": request.max_output_tokens,
        "max_tool_calls": request.max_tool_calls,
        "metadata": request.metadata,
        "parallel_tool_calls": request.parallel_tool_calls,
        "presence_penalty": params.sampling.presence_penalty,
        "previous_response_id": None,
        "prompt_cache_key": request.prompt_cache_key,
        "reasoning": {"effort": request.reasoning.effort, "summary": None},
        "safety_identifier": request.safety_identifier,
        "service_tier": "default",
        "store": False,
        "temperature": params.sampling.temperature,
        "text": {"format": {"type": "text"}, **request.text},
        "tool_choice": request.tool_choice,
        "top_logprobs": request.top_logprobs,
        "top_p": params.sampling.top_p,
        "truncation": request.truncation,
        "user": request.user,
    }


#: The events that have the whole response.
_ENDS = frozenset({"response.completed", "response.incomplete", "response.failed"})


class ResponseEvents(sse.EventWriter[sse.Event | RunEvent | CompactedEvent]):
    """Writes the stream of a response."""

    def __init__(self, builder: ResponseBuilder, repeated: str) -> None:
        self._builder, self._chat = builder, builder.chat
        self._repeated = repeated
        self._n_events = 0
        #: The event with the whole response, and what follows it; and the events before.
        self.end_of_stream, self.n_before_end = b"", 0
        self._live = LiveTimings(builder.n_prompt, builder.chat)

    @classmethod
    async def of(cls, builder: ResponseBuilder, size: int) -> Self:
        """Encode once what several events repeat of the request, which has about `size` bytes."""
        repeated = await offload(lambda: sse.encode(builder.repeated), size, LONG)
        return cls(builder, repeated)

    def encode(self, index: int, event: sse.Event | RunEvent | CompactedEvent) -> bytes:
        """Encode an event of an output as server-sent events."""
        if isinstance(event, StepChunk):
            event = event.chunk
        events = [*self._builder.begin(), *self._builder.take(event)]
        extra: dict[str, Any] = {}
        if isinstance(event, ChatChunk):
            self._live.on_output(len(event.tokens), event.drafts)
            extra |= self._live.now()
        elif isinstance(event, Progress):
            if (told := self._live.progress(event)) is not None:
                running = {"type": "response.in_progress", "response": self._builder.response}
                events, extra = events or [running], told
        elif isinstance(event, Finished):
            extra["timings"] = timings_of(event.timings)
        elif isinstance(event, RunEnded):
            extra["timings"] = timings_of(event.answer.timings)
        elif isinstance(event, StepStarted):
            self._live = LiveTimings(0, self._chat)
        if events:
            events[-1] = events[-1] | extra
        return self._write_all(events)

    def fail(self, error: Exception) -> bytes:
        """Write what ends a stream that had begun: the response as it failed, and the error."""
        known = errors.known(error)
        events = self._builder.fail(known) if self._builder.begun else []
        return self._write_all([*events, as_event(errors.body(known))])

    def _write_all(self, events: Sequence[Event]) -> bytes:
        written = [self._write(each) for each in events]
        kinds = [each["type"] for each in events]
        if (end := next((i for i, kind in enumerate(kinds) if kind in _ENDS), None)) is not None:
            self.end_of_stream = b"".join(written[end:])
            self.n_before_end = self._n_events - len(events) + end
        return b"".join(written)

    @property
    def response(self) -> Mapping[str, Any] | None:
        """The response as it is, once it has begun."""
        return self._builder.response if self._builder.begun else None

    def _write(self, event: Event) -> bytes:
        kind = event["type"]
        numbered = {"type": kind, "sequence_number": self._n_events, **event}
        self._n_events += 1
        response = numbered.pop("response", None)
        data = sse.encode(numbered)
        if response is not None:
            own = {
                name: value
                for name, value in response.items()
                if name not in self._builder.repeated
            }
            data = f'{data[:-1]},"response":{self._repeated[:-1]},{sse.encode(own)[1:]}}}'
        return f"event: {kind}\ndata: {data}\n\n".encode()
