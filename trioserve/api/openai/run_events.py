"""What is written of a run: its events as JSON, and the chunks of a streamed chat.

The text of all steps is streamed as that of one message. What else happens is told in between, in
chunks with an empty delta and a field of their own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import attrs

from trioserve.api.base import sse, writers
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.base.own_form import Verbose
from trioserve.api.openai.events import ChoiceEvents, Frame
from trioserve.chat.deltas import Delta, ToolCallArguments, ToolCallStart
from trioserve.server.runs.events import (
    ApprovalGiven,
    ApprovalNeeded,
    RunAnswer,
    RunCall,
    RunEnded,
    RunEvent,
    StepChunk,
    StepStarted,
    ToolCalled,
    ToolOutput,
    ToolReturned,
    ToolStarted,
)
from trioserve.server.stream import ChatChunk
from trioserve.types import GenerationParams, Progress, Timings

#: The field of a chunk that tells what happens.
EVENT = "trioserve_event"


def event_fields(event: RunEvent) -> dict[str, Any]:
    """Write an event, unless it is a `StepChunk`, as both APIs have it."""
    kind, fields = _kind_and_fields(event)
    if isinstance(event, StepStarted | StepChunk | RunEnded):
        return {"type": kind, "id": event.id, **fields}
    return {"type": kind, "id": event.id, "call_id": event.call.id, **fields}


def _kind_and_fields(event: RunEvent) -> tuple[str, dict[str, Any]]:
    match event:
        case StepStarted(step=step):
            return "step", {"step": step}
        case ToolCalled(call=call):
            return "call", _call(call)
        case ApprovalNeeded(preview=preview):
            return "approval", {"preview": preview}
        case ApprovalGiven(approved=approved, reason=reason):
            return "approved" if approved else "denied", {"reason": reason}
        case ToolStarted():
            return "started", {}
        case ToolOutput(text=text):
            return "output", {"text": text}
        case ToolReturned():
            return "result", attrs.asdict(event, filter=_is_of_result)
        case RunEnded(answer=answer):
            return "end", _end(answer)
    raise AssertionError(event)


def _call(call: RunCall) -> dict[str, Any]:
    return {
        "step": call.step,
        "tool": call.tool.name,
        "kind": call.tool.kind,
        "display_name": call.tool.display_name,
        "arguments": call.arguments,
        "writes": call.tool.writes,
    }


def _is_of_result(attribute: attrs.Attribute[Any], _: Any) -> bool:
    return attribute.name not in ("id", "call")


def _end(answer: RunAnswer) -> dict[str, Any]:
    return {"reason": answer.reason, "steps": answer.steps, "messages": list(answer.messages)}


def finish_reason(answer: RunAnswer) -> str:
    """Say why a run has ended, in OpenAI's words."""
    reasons = {"answer": "stop", "client_tools": "tool_calls"}
    return reasons.get(answer.reason, "length")


def usage(answer: RunAnswer) -> dict[str, Any]:
    """Count tokens: the output of all steps, and the prompt of the last one."""
    return writers.usage(len(answer.prompt), [counted(answer)])


def counted(answer: RunAnswer) -> Timings:
    """The timings of a run, with the numbers of tokens in the prompt of its last step."""
    last = answer.finished.timings
    return attrs.evolve(answer.timings, cache_n=last.cache_n, prompt_n=last.prompt_n)


class ClientCalls:
    """Picks, of what the model writes, all but the calls that the server runs.

    Args:
        names: of the client's own tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._indexes: dict[int, int] = {}  # of calls in the step, and among those that are told

    def begin_step(self) -> None:
        """Begin the next answer of the model."""
        self._indexes = {}

    def pick(self, chunk: ChatChunk) -> ChatChunk:
        """Take the next part of an answer."""
        picked = map(self._pick, chunk.deltas)
        return attrs.evolve(chunk, deltas=tuple(each for each in picked if each is not None))

    def _pick(self, delta: Delta) -> Delta | None:
        if isinstance(delta, ToolCallStart) and delta.name in self._names:
            self._indexes[delta.index] = len(self._indexes)
        if not isinstance(delta, ToolCallStart | ToolCallArguments):
            return delta
        index = self._indexes.get(delta.index)
        return None if index is None else attrs.evolve(delta, index=index)


class RunEvents:
    """Writes the chunks of a streamed chat for which the server runs tools."""

    def __init__(
        self, model: str, request: ChatRequest, params: GenerationParams, verbose: Verbose
    ) -> None:
        self._request, self._verbose = request, verbose
        self._frame = Frame(model, "chat.completion.chunk", "chatcmpl")
        self.id = self._frame.id
        self._choice = ChoiceEvents(0, self._frame, request, params, 0)
        self._calls = ClientCalls(request.tool_names)
        self._last: Mapping[str, Any] = {}  # the fields of the chunk with the usage

    def encode(self, index: int, event: RunEvent) -> bytes:
        """Write an event."""
        if isinstance(event, StepChunk):
            return self._step(event.chunk).encode()
        if isinstance(event, StepStarted):
            self._calls.begin_step()
            self._choice.begin_prompt(0)
        told = self._choice.aside(**{EVENT: event_fields(event)})
        if isinstance(event, RunEnded):
            told += self._end(event.answer)
        return told.encode()

    def _step(self, chunk: ChatChunk | Progress) -> str:
        if isinstance(chunk, ChatChunk):
            return self._choice.chunk(self._calls.pick(chunk))
        if self._request.return_progress:
            return self._choice.progress(chunk)
        self._choice.note(chunk)
        return ""

    def _end(self, answer: RunAnswer) -> str:
        self._last = {"usage": usage(answer), "timings": writers.timings(answer.timings)}
        last = attrs.evolve(answer.finished, timings=answer.timings)
        more = self._verbose(0, answer.prompt, last)
        return self._choice.last(last, more, reason=finish_reason(answer))

    def end(self) -> bytes:
        """Write the usage, where it was asked for, and the last line."""
        if not self._request.stream_options.include_usage:
            return sse.DONE
        return self._frame.chunk("", **self._last).encode() + sse.DONE
