"""Writes answers and errors for Ollama's clients, streamed or whole.

Each part of a stream is an object with the new output. The last one has the reason for the end and
all durations, in nanoseconds. Streams are lines of JSON, without event names or comments. Clients
parse every line, so a part without text serves as a ping.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from time import monotonic
from typing import Any, TypeAlias

import attrs

from trioserve.api.base import sse
from trioserve.api.base.cut_json import read_arguments
from trioserve.api.base.errors import message_of
from trioserve.api.base.fields import STRING, object_schema
from trioserve.api.base.scores import candidates_of
from trioserve.api.base.text_tokens import TokensOfText
from trioserve.api.base.vendors import ErrorShape
from trioserve.chat.deltas import (
    ContentDelta,
    Message,
    MessageBuilder,
    ReasoningDelta,
    ToolCall,
    ToolCallArguments,
    ToolCallStart,
)
from trioserve.errors import TrioServeError, UnknownModelError
from trioserve.server.stream import ChatChunk
from trioserve.types import Chunk, Finished, FinishReason, Progress, TokenProbs

# -- errors


_SCHEMA = object_schema("error", error=STRING)


def body(error: TrioServeError, request_id: str) -> dict[str, Any]:
    """Make the JSON body of an error."""
    return {"error": message_of(error, request_id)}


def line(value: Any, n_before: int = 0) -> bytes:
    """Write a line of a stream. An error is written in the same way, and ends the stream."""
    return f"{sse.encode(value)}\n".encode()


def status(error: TrioServeError) -> int:
    """The status of an error. On a 404, clients pull the model."""
    return 404 if isinstance(error, UnknownModelError) else error.status


SHAPE = ErrorShape(body, _SCHEMA, line, status)
"""The shape of errors for Ollama's clients. Only the status of unknown models differs."""


# -- parts


CONTENT_TYPE = "application/x-ndjson"

#: The parts of a message whose tokens have log probabilities.
TEXT = (ContentDelta, ReasoningDelta)


def rfc3339(moment: datetime) -> str:
    """Write a moment as Ollama does, in UTC."""
    return moment.astimezone(UTC).isoformat().replace("+00:00", "Z")


#: Writes what was said, or a part of it.
Body: TypeAlias = Callable[[Message], dict[str, Any]]


def chat_body(message: Message) -> dict[str, Any]:
    """Write a message, or a part of one, for ``/api/chat``."""
    written: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning_content:
        written["thinking"] = message.reasoning_content
    if message.tool_calls:
        written["tool_calls"] = [
            {
                "id": call.id,
                "function": {"name": call.name, "arguments": read_arguments(call.arguments)},
            }
            for call in message.tool_calls
        ]
    return {"message": written}


def generate_body(message: Message) -> dict[str, Any]:
    """Write a text, or a part of one, for ``/api/generate``."""
    written: dict[str, Any] = {"response": message.content}
    if message.reasoning_content:
        written["thinking"] = message.reasoning_content
    return written


#: What writes the parts of a stream, by the route.
BODIES: Mapping[str, Body] = {"/api/chat": chat_body, "/api/generate": generate_body}


@attrs.frozen(kw_only=True)
class Writer:
    """Writes the answer to one request, or its parts."""

    model: str
    body: Body
    n_top: int = 0  # candidates to show for each token
    arrived: float = 0.0  # when the request came (`time.monotonic`: there may be no event loop)
    ready: float = 0.0  # when the model was there to answer it

    def part(self, message: Message, probs: Sequence[TokenProbs] = ()) -> dict[str, Any]:
        """Write a part that is not the last one."""
        return self._write(message, probs, {"done": False})

    def empty(self) -> bytes:
        """Write the line of a part without text."""
        return line(self.part(Message()))

    def last(
        self, message: Message, finished: Finished, probs: Sequence[TokenProbs] = ()
    ) -> dict[str, Any]:
        """Write the last part, or all of an answer."""
        timings = finished.timings
        reason = "length" if finished.reason is FinishReason.LIMIT else "stop"
        return self._write(
            message,
            probs,
            {
                "done": True,
                "done_reason": reason,
                "total_duration": nanoseconds(monotonic() - self.arrived),
                "load_duration": nanoseconds(self.ready - self.arrived),
                "prompt_eval_count": timings.cache_n + timings.prompt_n,
                "prompt_eval_duration": nanoseconds(timings.prompt_ms / 1e3),
                "eval_count": timings.predicted_n,
                "eval_duration": nanoseconds(timings.predicted_ms / 1e3),
            },
        )

    def nothing(self, reason: str) -> dict[str, Any]:
        """Write the answer to a request that only loads the model."""
        return self._write(Message(), (), {"done": True, "done_reason": reason})

    def _write(
        self, message: Message, probs: Sequence[TokenProbs], end: Mapping[str, Any]
    ) -> dict[str, Any]:
        head = {"model": self.model, "created_at": rfc3339(datetime.now(UTC))}
        written = {**head, **self.body(message), **end}
        if probs:
            written["logprobs"] = candidates_of(probs, post_sampling=False, n_top=self.n_top)
        return written


def nanoseconds(seconds: float) -> int:
    """Write a length of time. It is never 0, because clients divide by it."""
    return max(1, round(seconds * 1e9))


class OllamaEvents(sse.EventWriter[sse.Event]):
    """Writes the parts of a streamed answer. A call is written when it is complete."""

    content_type = CONTENT_TYPE

    def __init__(self, writer: Writer, pieces: Sequence[bytes] | None = None) -> None:
        """Make it; `pieces` are the bytes of each token, where log probabilities are asked for."""
        self._writer = writer
        self._tokens = None if pieces is None else TokensOfText(pieces)
        self._call: ToolCall | None = None  # that has begun

    def encode(self, index: int, event: sse.Event) -> bytes:
        """Write an event; empty if it has no content."""
        if isinstance(event, Progress):
            return b""
        if isinstance(event, Finished):
            return self._rest() + line(self._writer.last(Message(), event))
        message = self._message(event)
        probs = self._probs(event)
        is_empty = not (message.content or message.reasoning_content or message.tool_calls)
        if is_empty and not probs:
            return b""
        return line(self._writer.part(message, probs))

    def _probs(self, event: Chunk | ChatChunk) -> Sequence[TokenProbs]:
        """The candidates for the tokens of the text in an event."""
        if self._tokens is None or isinstance(event, Chunk):
            return event.probs
        self._tokens.add(event.tokens, event.probs)
        taken = zip(event.deltas, self._tokens.take(event.deltas), strict=True)
        return [each for delta, (_, probs) in taken if isinstance(delta, TEXT) for each in probs]

    async def comment(self, pings: sse.Pings) -> bytes:
        """Write a part without text as a ping, because clients skip no line."""
        return self._writer.empty()

    def _rest(self) -> bytes:
        calls = self._complete()
        return line(self._writer.part(Message(tool_calls=calls))) if calls else b""

    def _message(self, event: Chunk | ChatChunk) -> Message:
        if isinstance(event, Chunk):
            return Message(event.text)
        text = MessageBuilder()
        calls: tuple[ToolCall, ...] = ()
        for delta in event.deltas:
            match delta:
                case ToolCallStart(_, id_, name):
                    calls += self._complete()
                    self._call = ToolCall(id_, name, "")
                case ToolCallArguments(_, more):
                    assert self._call is not None
                    self._call = attrs.evolve(self._call, arguments=self._call.arguments + more)
                case _:
                    calls += self._complete()
                    text.add(delta)
        return attrs.evolve(text.build(), tool_calls=calls)

    def _complete(self) -> tuple[ToolCall, ...]:
        call, self._call = self._call, None
        return () if call is None else (call,)
