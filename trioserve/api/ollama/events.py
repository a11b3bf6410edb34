"""Writes answers and errors for Ollama's clients, streamed or whole.

Each part of a stream is an object with the new output. The last one has the reason for the end and
all durations, in nanoseconds. Streams are lines of JSON, without event names or comments. Clients
parse every line, so a part without text serves as a ping.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Any, ClassVar, Literal, Self

import attrs
from msgspec import UNSET, UnsetType

from trioserve.api.base import sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.cut_json import read_arguments
from trioserve.api.base.errors import message_of
from trioserve.api.base.reply import Pings
from trioserve.api.base.scores import TokenProbs as WrittenProbs, candidates_of
from trioserve.api.base.text_tokens import TokensOfText
from trioserve.api.base.vendors import ErrorShape
from trioserve.chat.deltas import (
    ContentDelta,
    Message,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
)
from trioserve.errors import TrioServeError
from trioserve.server.stream import ChatChunk
from trioserve.types import Chunk, Finished, FinishReason, Progress, TokenProbs

# -- errors


class OllamaError(Answer):
    """The body of an error."""

    error: str


def body(error: TrioServeError, request_id: str) -> dict[str, Any]:
    """Make the JSON body of an error."""
    return {"error": message_of(error, request_id)}


def line(value: Any, n_before: int = 0) -> bytes:
    """Write a line of a stream. An error is written in the same way, and ends the stream."""
    return f"{sse.encode(value)}\n".encode()


CONTENT_TYPE = "application/x-ndjson"

SHAPE = ErrorShape(body, OllamaError, line, content_type=CONTENT_TYPE)
"""The shape of errors for Ollama's clients."""


# -- parts


class _OllamaFunction(Answer):
    name: str
    arguments: dict[str, Any]


class _OllamaCall(Answer):
    id: str
    function: _OllamaFunction


class _OllamaMessage(Answer, kw_only=True):
    role: Literal["assistant"] = "assistant"
    content: str
    thinking: str | UnsetType = UNSET
    tool_calls: Sequence[_OllamaCall] | UnsetType = UNSET


class Part(Answer, kw_only=True):
    """An answer, or a part of its stream; only the last one has a reason and times.

    The fields that both kinds have stand in each, in Ollama's order.
    """

    model: str
    created_at: datetime

    of: ClassVar[Callable[..., Part]]  # writes what was said, a `Message`, and other fields


class OllamaChat(Part, kw_only=True, rename={"said": "message"}):
    """The answer of ``/api/chat``."""

    said: _OllamaMessage
    done: bool = False
    done_reason: str = UNSET  # type: ignore[assignment]  # in all but parts
    logprobs: Sequence[WrittenProbs] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET

    @classmethod
    def of(cls, message: Message, **fields: Any) -> Self:
        calls = [
            _OllamaCall(each.id, _OllamaFunction(each.name, read_arguments(each.arguments)))
            for each in message.tool_calls
        ]
        written = _OllamaMessage(
            content=message.content,
            thinking=message.reasoning_content or UNSET,
            tool_calls=calls or UNSET,
        )
        return cls(said=written, **fields)


class OllamaGenerated(Part, kw_only=True, rename={"said": "response"}):
    """The answer of ``/api/generate``."""

    said: str
    thinking: str | UnsetType = UNSET
    done: bool = False
    done_reason: str = UNSET  # type: ignore[assignment]  # in all but parts
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET
    logprobs: Sequence[WrittenProbs] | UnsetType = UNSET

    @classmethod
    def of(cls, message: Message, **fields: Any) -> Self:
        thinking = message.reasoning_content or UNSET
        return cls(said=message.content, thinking=thinking, **fields)


@attrs.frozen(kw_only=True)
class Writer:
    """Writes the answer to one request, or its parts."""

    model: str
    kind: type[Part]
    n_top: int = 0  # candidates to show for each token
    arrived: float = 0.0  # when the request came (`time.monotonic`: there may be no event loop)
    ready: float = 0.0  # when the model was there to answer it

    def part(self, message: Message, probs: Sequence[TokenProbs] = (), **end: Any) -> Part:
        """Write a part, or all of an answer with its `end`."""
        if probs:
            end["logprobs"] = candidates_of(probs, post_sampling=False, n_top=self.n_top)
        return self.kind.of(message, model=self.model, created_at=datetime.now(UTC), **end)

    def empty(self) -> bytes:
        """Write the line of a part without text."""
        return line(self.part(Message()))

    def last(self, message: Message, finished: Finished, probs: Sequence[TokenProbs] = ()) -> Part:
        """Write the last part, or all of an answer."""
        timings = finished.timings
        return self.part(
            message,
            probs,
            done=True,
            done_reason="length" if finished.reason is FinishReason.LIMIT else "stop",
            total_duration=nanoseconds(monotonic() - self.arrived),
            load_duration=nanoseconds(self.ready - self.arrived),
            prompt_eval_count=timings.cache_n + timings.prompt_n,
            prompt_eval_duration=nanoseconds(timings.prompt_ms / 1e3),
            eval_count=timings.predicted_n,
            eval_duration=nanoseconds(timings.predicted_ms / 1e3),
        )

    def nothing(self, reason: str) -> Part:
        """Write the answer to a request that only loads the model."""
        return self.part(Message(), done=True, done_reason=reason)


def nanoseconds(seconds: float) -> int:
    """Write a length of time. It is never 0, because clients divide by it."""
    return max(1, round(seconds * 1e9))


class OllamaEvents(sse.EventWriter[sse.Event]):
    """Writes the parts of a streamed answer. A call is written when it is complete."""

    content_type = CONTENT_TYPE

    def __init__(self, writer: Writer, *, with_probs: bool = False) -> None:
        self._writer = writer
        self._tokens = TokensOfText() if with_probs else None
        self._call: ToolCall | None = None  # that has begun

    def encode(self, index: int, event: sse.Event) -> bytes:
        """Write an event; empty if it has no content."""
        if isinstance(event, Progress):
            return b""
        if isinstance(event, Finished):
            return self._rest() + line(self._writer.last(Message(), event))
        if isinstance(event, Chunk):
            parts = [_Said(event.text, probs=[*event.probs])]
        else:
            parts = self._said(event)
        written = [each for each in parts if each.message != Message() or each.probs]
        return b"".join(line(self._writer.part(each.message, each.probs)) for each in written)

    async def comment(self, pings: Pings) -> bytes:
        """Write a part without text as a ping, because clients skip no line."""
        return self._writer.empty()

    def _rest(self) -> bytes:
        calls = self._complete()
        return line(self._writer.part(Message(tool_calls=calls))) if calls else b""

    def _said(self, event: ChatChunk) -> list[_Said]:
        """Take an event apart. The thinking of a part comes before its text, and calls last."""
        probs_of: list[list[TokenProbs]] = [[] for _ in event.deltas]
        if self._tokens is not None:
            probs_of = [probs for _, _, probs in self._tokens.match(event)]
        parts = [_Said()]
        for delta, probs in zip(event.deltas, probs_of, strict=True):
            if isinstance(delta, ToolCallArguments):
                assert self._call is not None
                self._call = attrs.evolve(self._call, arguments=self._call.arguments + delta.text)
                continue
            parts[-1].calls += self._complete()
            if isinstance(delta, ToolCallStart):
                self._call = ToolCall(delta.id, delta.name, "")
                continue
            if parts[-1].calls or (parts[-1].text and isinstance(delta, ReasoningDelta)):
                parts.append(_Said())
            if isinstance(delta, ContentDelta):
                parts[-1].text += delta.text
            else:
                parts[-1].thinking += delta.text
            parts[-1].probs += probs
        return parts

    def _complete(self) -> tuple[ToolCall, ...]:
        call, self._call = self._call, None
        return () if call is None else (call,)


@attrs.define
class _Said:
    """A part of a message, and the candidates for the tokens of its text."""

    text: str = ""
    thinking: str = ""
    calls: tuple[ToolCall, ...] = ()
    probs: list[TokenProbs] = attrs.field(factory=list)

    @property
    def message(self) -> Message:
        """The part as a message."""
        return Message(self.text, self.thinking, self.calls)
