"""Writes OpenAI's streams. This is the hot path: one call for each token and client.

What is the same in all chunks of a response is written once; each chunk adds its delta.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal, TypeAlias

import attrs

from trioserve.api.base import sse
from trioserve.api.base.chat_request import ChatRequest
from trioserve.api.base.custom_tools import TextArgument
from trioserve.api.base.generation_request import GenerationRequest
from trioserve.api.base.output import FINGERPRINT, LiveTimings, OutputWriter, new_id, timings_of
from trioserve.api.base.text_tokens import TEXT, TokensOfText
from trioserve.api.base.usage import Usage, usage_of
from trioserve.api.openai.logprobs import (
    TextLogprobs,
    chat_logprobs,
    echoed_logprobs,
    text_logprobs,
    text_offsets,
)
from trioserve.chat.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from trioserve.chat.template.continuation import final_message_deltas
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
from trioserve.types import (
    Chunk,
    Finished,
    FinishReason,
    GenerationParams,
    Progress,
    Prompt,
    Timings,
)

#: Why an answer has ended, in OpenAI's words.
Reason: TypeAlias = Literal["stop", "length", "tool_calls"]


def finish_reason(reason: FinishReason, *, tool_calls: bool = False) -> Reason:
    """Translate the finish reason to OpenAI's names."""
    if reason is FinishReason.LIMIT:
        return "length"
    return "tool_calls" if tool_calls else "stop"


class Frame:
    """The fields that all chunks of a response share."""

    def __init__(self, model: str, object_: str, prefix: str) -> None:
        self.id = new_id(prefix)
        shared = {
            "created": int(time.time()),
            "id": self.id,
            "model": model,
            "system_fingerprint": FINGERPRINT,
            "object": object_,
        }
        self._shared = sse.encode(shared)[1:-1]
        self._tail = f"],{self._shared}}}\n\n"

    def chunk(self, choice: str, **extra: Any) -> str:
        """Write a chunk with one choice, or with none."""
        if not extra:
            return f'data: {{"choices":[{choice}{self._tail}'
        return f'data: {{"choices":[{choice}],{self._shared},{sse.encode(extra)[1:-1]}}}\n\n'


class ChatEvents(sse.EventWriter[sse.Event | RunEvent]):
    """Writes the chunks of a streamed chat, of `n` choices, or of a run of tools.

    Without ``include_usage`` the last chunk of each choice carries its timings, as in
    llama-server; with it, one more chunk carries the usage of all, as in OpenAI's API. The `prompt`
    of a run is known at its end.
    """

    def __init__(
        self,
        request: ChatRequest,
        params: GenerationParams,
        writer: OutputWriter,
        prompt: Prompt | None = None,
        n: int = 1,
    ) -> None:
        self.request, self.params, self.writer, self.prompt = request, params, writer, prompt
        self._n_prompt = 0 if prompt is None else len(prompt)
        self._frame = Frame(writer.model, "chat.completion.chunk", "chatcmpl")
        self.id, self.n = self._frame.id, n
        self._opened = n == 1
        self._choices: Sequence[ChoiceEvents] = [
            self.kind_of_choice()(i, self._frame, request, params, self._n_prompt) for i in range(n)
        ]
        self._calls = ClientCalls(request.tool_names)
        self._totals: Mapping[str, Any] = {}  # of a run, when it has ended

    def kind_of_choice(self) -> type[ChoiceEvents]:
        """Say what writes the chunks of each choice."""
        return ChoiceEvents

    def encode(self, index: int, event: sse.Event | RunEvent) -> bytes:
        """Write an event of one choice."""
        choice = self._choices[index]
        if isinstance(event, StepChunk):
            event = event.chunk
        if isinstance(event, Progress) and not self.request.return_progress:
            choice.progress(event)
            return b""
        begin = "" if self._opened else self._open()
        return (begin + self._told(index, choice, event)).encode()

    async def settle(self, event: sse.Event | RunEvent) -> None:
        """Get the text of the prompt, if the answer shows it."""
        prompt = event.answer.prompt if isinstance(event, RunEnded) else self.prompt
        assert prompt is not None
        await self.writer.read(prompt)

    def _told(self, index: int, choice: ChoiceEvents, event: sse.Event | RunEvent) -> str:
        if isinstance(event, ChatChunk):
            is_run = self.request.run_tools is not None
            return choice.chunk(self._calls.pick(event) if is_run else event)
        if isinstance(event, Finished):
            assert self.prompt is not None
            return choice.last(event, self.writer.verbose(index, self.prompt, event))
        if isinstance(event, Progress):
            return choice.progress(event)
        assert not isinstance(event, Chunk)
        if isinstance(event, StepStarted):
            self._calls.begin_step()
            choice.begin_prompt(0)
        told = choice.aside(**{EVENT: event_fields(event)})
        return told + self._ended(choice, event.answer) if isinstance(event, RunEnded) else told

    def _ended(self, choice: ChoiceEvents, answer: RunAnswer) -> str:
        self._totals = {"usage": usage(answer), "timings": timings_of(answer.timings)}
        last = attrs.evolve(answer.finished, timings=answer.timings)
        more = self.writer.verbose(0, answer.prompt, last)
        return choice.last(last, more, reason=run_reason(answer))

    def _open(self) -> str:
        """Begin several choices in their order, before the first event: OpenAI's client wants it.

        One that is alone begins with its own first event.
        """
        self._opened = True
        return "".join(choice.begin() for choice in self._choices)

    def end(self) -> bytes:
        """Write the usage, if requested, and the last line."""
        if not self.request.stream_options.include_usage:
            return sse.DONE
        totals = self._totals
        if not totals:
            timings = [choice.timings for choice in self._choices]
            used = usage_of(self._n_prompt, timings, copies=len(timings))
            totals = {"usage": used, "timings": timings_of(timings[0])}
        return self._frame.chunk("", **totals).encode() + sse.DONE


class ChoiceEvents:
    """Writes the chunks of one choice."""

    def __init__(
        self,
        index: int,
        frame: Frame,
        request: ChatRequest,
        params: GenerationParams,
        n_prompt: int,
    ) -> None:
        self.timings = Timings()  # known at the end
        self._index = index
        self._frame, self._request, self._params = frame, request, params
        self.begin_prompt(n_prompt)
        self._echo = final_message_deltas(request.messages) if request.continuation.echo else ()
        self._began = False
        self._called = False
        self._inputs: dict[int, TextArgument] = {}  # of calls of custom tools

    def begin_prompt(self, n_prompt: int) -> None:
        """Begin a prompt: further measurements are about this one, and its output."""
        self._live = LiveTimings(n_prompt, self._request)
        self._tokens = TokensOfText() if self._params.n_probs else None

    def aside(self, **fields: Any) -> str:
        """Write something outside the message."""
        return self.begin() + self._frame.chunk(self._choice("{}"), **fields)

    def progress(self, event: Progress) -> str:
        """Write the progress of the prompt, if it is asked for."""
        if (extra := self._live.progress(event)) is None:
            return ""
        self._began = True
        return self._frame.chunk(self._choice(_ROLE), **extra)

    def chunk(self, event: ChatChunk) -> str:
        """Encode the part of a chunk that is new for the client; "" if nothing is."""
        deltas = self._choices_of(event)
        if self._echo or not self._began:
            deltas = [*self._begin(), *deltas]
        live = self._live.is_wanted
        if live:
            self._live.on_output(len(event.tokens), event.drafts)
        if not deltas:
            return ""
        *first, last = deltas
        extra = self._live.now() if live else {}
        return "".join(map(self._frame.chunk, first)) + self._frame.chunk(last, **extra)

    def last(self, event: Finished, more: Mapping[str, Any], *, reason: str = "") -> str:
        """Write why it ended, unless that is given, and `more` beside."""
        self.timings = event.timings
        reason = reason or finish_reason(event.reason, tool_calls=self._called)
        choice = {"finish_reason": reason, "index": self._index, "delta": {}, "logprobs": None}
        if not self._request.stream_options.include_usage:
            more = {"timings": timings_of(event.timings), **more}
        if self._request.stream_options.continuous_usage_stats:
            more = {"usage": self._live.usage(event.timings), **more}
        return self.begin() + self._rest() + self._frame.chunk(sse.encode(choice), **more)

    def begin(self) -> str:
        """Write what comes before all that is new, once."""
        return "".join(map(self._frame.chunk, self._begin()))

    def _begin(self) -> list[str]:
        """The choices that come before all that is new."""
        role = [] if self._began else [self._choice(_ROLE)]
        self._began = True
        echo, self._echo = self._echo, ()
        return role + [self._choice(self._delta(each)) for each in echo]

    def _choices_of(self, event: ChatChunk) -> list[str]:
        """Write the choice of each delta, with the candidates for the tokens of its text."""
        if self._tokens is None:
            return [self._choice(self._delta(delta)) for delta in event.deltas]
        written = []
        for delta, _, probs in self._tokens.match(event):
            logprobs = "null"
            if isinstance(delta, TEXT):
                logprobs = sse.encode(chat_logprobs(probs, self._request, self._params))
            written.append(self._choice(self._delta(delta), logprobs))
        return written

    def _choice(self, delta: str, logprobs: str = "null") -> str:
        return (
            f'{{"finish_reason":null,"index":{self._index},"delta":{delta},"logprobs":{logprobs}}}'
        )

    def _delta(self, delta: Delta) -> str:
        if isinstance(delta, ContentDelta):
            return f'{{"content":{sse.encode(delta.text)}}}'
        if isinstance(delta, ReasoningDelta):
            return f'{{"reasoning_content":{sse.encode(delta.text)}}}'
        self._called = True
        return sse.encode({"tool_calls": [self._tool_call(delta)]})

    def _tool_call(self, delta: ToolCallStart | ToolCallArguments) -> dict[str, Any]:
        index, custom = delta.index, self._request.custom_tools
        if isinstance(delta, ToolCallStart):
            if delta.name not in custom:
                function = {"name": delta.name, "arguments": ""}
                return {"index": index, "id": delta.id, "type": "function", "function": function}
            self._inputs[index] = TextArgument()
            made = {"name": delta.name, "input": ""}
            return {"index": index, "id": delta.id, "type": "custom", "custom": made}
        if index in self._inputs:
            return {"index": index, "custom": {"input": self._inputs[index].feed(delta.text)}}
        return {"index": index, "function": {"arguments": delta.text}}

    def _rest(self) -> str:
        """Write the rest of the texts of custom tools, at the end."""
        rest = [(index, argument.rest()) for index, argument in self._inputs.items()]
        calls = [{"index": index, "custom": {"input": text}} for index, text in rest if text]
        if not calls:
            return ""
        return self._frame.chunk(self._choice(sse.encode({"tool_calls": calls})))


#: The first delta of a choice.
_ROLE = '{"role":"assistant","content":null}'


class CompletionEvents(sse.EventWriter[sse.Event]):
    """Writes the chunks of a streamed completion, of one or more prompts.

    Without ``include_usage`` the last chunk of each output carries its own usage, as in
    llama-server; with it, one more chunk carries that of all, as in OpenAI's API.
    """

    def __init__(
        self,
        request: GenerationRequest,
        params: GenerationParams,
        writer: OutputWriter,
        prompts: Sequence[Prompt],
        echoes: Sequence[str],
        n_top: int,
    ) -> None:
        self._request, self._params, self._n_top = request, params, n_top
        self._prompts, self._writer = prompts, writer
        self._frame = Frame(writer.model, "text_completion", "cmpl")
        self._n_prompts = [len(prompt) for prompt in prompts]
        self._echoes = list(echoes)
        self._offsets = [len(echo) for echo in echoes]  # of the next token in the text
        self._live = [LiveTimings(n, request) for n in self._n_prompts]
        self._timings = [Timings()] * len(prompts)  # known at the end
        self._tokens = [TokensOfText() for _ in prompts] if params.n_probs else []

    def encode(self, index: int, event: sse.Event) -> bytes:
        """Write an event of one output."""
        if isinstance(event, Chunk):
            return self._chunk(index, event).encode()
        if isinstance(event, Finished):
            return self._last(index, event).encode()
        assert isinstance(event, Progress)
        if (extra := self._live[index].progress(event)) is None:
            return b""
        return self._frame.chunk(self._choice(index, ""), **extra).encode()

    async def settle(self, event: sse.Event) -> None:
        """Get the texts of the prompts, if the answer shows them."""
        await self._writer.read(*self._prompts)

    def end(self) -> bytes:
        """Write the usage, if requested, and the last line."""
        if not self._request.stream_options.include_usage:
            return sse.DONE
        n = self._request.n_copies
        usage = usage_of(sum(self._n_prompts[::n]), self._timings, copies=n)
        return self._frame.chunk("", usage=usage).encode() + sse.DONE

    def _chunk(self, index: int, event: Chunk) -> str:
        self._live[index].on_output(len(event.tokens), event.drafts)
        if self._tokens:
            self._tokens[index].add(event.probs)
        if event.scores is not None:
            return self._frame.chunk(self._choice(index, "", logprobs=self._echoed(index, event)))
        if not event.text:
            return ""
        choice = self._choice(index, event.text, logprobs=self._logprobs(index, event.text))
        return self._frame.chunk(choice, **self._live[index].now())

    def _echoed(self, index: int, event: Chunk) -> TextLogprobs:
        assert event.scores is not None
        echo, prompt = self._echoes[index], self._prompts[index]
        return echoed_logprobs(echo, prompt, event.scores, self._n_top)

    def _logprobs(self, index: int, text: str) -> TextLogprobs | None:
        """Write the candidates for the tokens of a text."""
        if not self._tokens:
            return None
        ((_, probs),) = self._tokens[index].take([ContentDelta(text)])
        start = self._offsets[index]
        self._offsets[index] = text_offsets(probs, start)[-1]
        return text_logprobs(probs, self._params, self._n_top, offset=start)

    def _last(self, index: int, event: Finished) -> str:
        self._timings[index] = event.timings
        choice = self._choice(index, "", finish=finish_reason(event.reason))
        extra = self._writer.verbose(index, self._prompts[index], event)
        extra["timings"] = timings_of(event.timings)
        options = self._request.stream_options
        if options.continuous_usage_stats or not options.include_usage:
            extra["usage"] = usage_of(self._n_prompts[index], [event.timings])
        return self._frame.chunk(choice, **extra)

    def _choice(
        self,
        index: int,
        text: str,
        *,
        logprobs: TextLogprobs | None = None,
        finish: str | None = None,
    ) -> str:
        text, self._echoes[index] = self._echoes[index] + text, ""
        return sse.encode(
            {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}
        )


# -- runs of tools


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
            return "result", attrs.asdict(
                event, filter=lambda one, _: one.name not in ("id", "call", "answer")
            )
        case RunEnded(answer=answer):
            ended = {"reason": answer.reason, "steps": answer.steps}
            return "end", {**ended, "messages": list(answer.messages)}
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


def run_reason(answer: RunAnswer) -> Reason:
    """Translate the reason why a run ended to OpenAI's names."""
    reasons: Mapping[str, Reason] = {"answer": "stop", "client_tools": "tool_calls"}
    return reasons.get(answer.reason, "length")


def usage(answer: RunAnswer) -> Usage:
    """Count tokens: the output of all steps, and the prompt of the last one."""
    return usage_of(len(answer.prompt), [answer.counted])


class ClientCalls:
    """Removes the calls that the server runs from the model's output.

    Args:
        names: the names of the client's tools.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._indexes: dict[int, int] = {}  # call's index in the step -> index for the client

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
