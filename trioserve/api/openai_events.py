"""How OpenAI's streams are written. This is the hot path: one call a token and client.

What is the same in all chunks of a response is written once; each chunk adds its delta.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from time import monotonic
from typing import Any

from trioserve.api import payload, sse
from trioserve.api.schema import ChatRequest, CompletionRequest
from trioserve.chat.deltas import (
    ContentDelta,
    Delta,
    ReasoningDelta,
    ToolCallArguments,
    ToolCallStart,
)
from trioserve.stream import ChatChunk, ChatStream
from trioserve.types import Chunk, Finished, Options, Progress, Timings, TokenId, TokenProbs


def logprobs_of(
    values: Sequence[TokenProbs], wanted: ChatRequest | CompletionRequest, options: Options
) -> dict[str, Any]:
    """Write the candidates for each token, as OpenAI's and llama-server's clients look for them."""
    n_top = wanted.top_logprobs if isinstance(wanted, ChatRequest) else None
    content = payload.probs(values, post_sampling=options.post_sampling_probs, n_top=n_top)
    if isinstance(wanted, ChatRequest):
        return {"content": content, "refusal": None}
    key, list_key = (
        ("prob", "top_probs") if options.post_sampling_probs else ("logprob", "top_logprobs")
    )
    return {
        "content": content,
        "tokens": [each["token"] for each in content],
        "token_logprobs": [each[key] for each in content],
        "top_logprobs": [{top["token"]: top[key] for top in each[list_key]} for each in content],
    }


class _Frame:
    """What all chunks of a response share."""

    def __init__(self, model: str, object_: str, prefix: str) -> None:
        shared = {
            "created": int(time.time()),
            "id": payload.new_id(prefix),
            "model": model,
            "system_fingerprint": payload.FINGERPRINT,
            "object": object_,
        }
        self._shared = sse.encode(shared)[1:-1]
        self._tail = f"],{self._shared}}}\n\n"

    def chunk(self, choice: str, **extra: Any) -> str:
        """Write a chunk with one choice, or with none."""
        if not extra:
            return f'data: {{"choices":[{choice}{self._tail}'
        return f'data: {{"choices":[{choice}],{self._shared},{sse.encode(extra)[1:-1]}}}\n\n'


class ChatEvents:
    """Writes the chunks of a streamed chat completion."""

    def __init__(
        self, model: str, wanted: ChatRequest, options: Options, stream: ChatStream
    ) -> None:
        self._wanted, self._options = wanted, options
        self._n_prompt = len(stream.prompt)
        self._frame = _Frame(model, "chat.completion.chunk", "chatcmpl")
        self._live = payload.LiveTimings(self._n_prompt, monotonic)
        self._began = False
        self._called = False
        self._n_predicted = 0
        self._probs: list[TokenProbs] = []  # of tokens whose text is held back

    def encode(self, index: int, event: sse.Event) -> bytes:
        """Write an event."""
        if isinstance(event, ChatChunk):
            return self._chunk(event).encode()
        if isinstance(event, Finished):
            return self._last(event).encode()
        assert isinstance(event, Progress)
        self._live.on_progress(event)
        if not self._wanted.return_progress:
            return b""
        self._began = True
        extra = {"prompt_progress": payload.progress(event)}
        return self._frame.chunk(_ROLE, **extra).encode()

    def end(self) -> bytes:
        """Write the last line."""
        return sse.DONE

    def _chunk(self, event: ChatChunk) -> str:
        self._n_predicted += len(event.tokens)
        self._probs += event.probs
        written = [] if self._began else [self._frame.chunk(_ROLE)]
        self._began = True
        if event.deltas:
            *first, last = event.deltas
            written += [self._frame.chunk(_choice(self._delta(delta))) for delta in first]
            written.append(self._with_extras(self._delta(last)))
        return "".join(written)

    def _with_extras(self, delta: str) -> str:
        """Write the last delta of an event, and with it what else was asked for."""
        probs = ""
        if self._probs:
            logprobs = logprobs_of(self._probs, self._wanted, self._options)
            probs = f',"logprobs":{sse.encode(logprobs)}'
            self._probs = []
        choice = f'{{"finish_reason":null,"index":0,"delta":{delta}{probs}}}'
        if not self._wanted.timings_per_token:
            return self._frame.chunk(choice)
        live = payload.timings(self._live.at(self._n_predicted))
        return self._frame.chunk(choice, timings=live)

    def _delta(self, delta: Delta) -> str:
        if isinstance(delta, ContentDelta):
            return f'{{"content":{sse.encode(delta.text)}}}'
        if isinstance(delta, ReasoningDelta):
            return f'{{"reasoning_content":{sse.encode(delta.text)}}}'
        self._called = True
        return sse.encode({"tool_calls": [_tool_call(delta)]})

    def _last(self, event: Finished) -> str:
        reason = payload.finish_reason(event.reason, tool_calls=self._called)
        choice: dict[str, Any] = {"finish_reason": reason, "index": 0, "delta": {}}
        if self._probs:
            choice["logprobs"] = logprobs_of(self._probs, self._wanted, self._options)
        begin = "" if self._began else self._frame.chunk(_ROLE)
        timings = payload.timings(event.timings)
        if not self._wanted.stream_options.include_usage:
            return begin + self._frame.chunk(sse.encode(choice), timings=timings)
        usage = payload.usage(self._n_prompt, [event.timings])
        return (
            begin
            + self._frame.chunk(sse.encode(choice))
            + self._frame.chunk("", usage=usage, timings=timings)
        )


def _choice(delta: str) -> str:
    return f'{{"finish_reason":null,"index":0,"delta":{delta}}}'


#: The choice of the first chunk.
_ROLE = _choice('{"role":"assistant","content":null}')


def _tool_call(delta: ToolCallStart | ToolCallArguments) -> dict[str, Any]:
    if isinstance(delta, ToolCallStart):
        return {
            "index": delta.index,
            "id": delta.id,
            "type": "function",
            "function": {"name": delta.name, "arguments": ""},
        }
    return {"index": delta.index, "function": {"arguments": delta.text}}


class CompletionEvents:
    """Writes the chunks of a streamed completion, of one or more prompts.

    Without ``include_usage`` the last chunk of each output carries its own usage, as in
    llama-server; with it, one more chunk carries that of all, as in OpenAI's API.
    """

    def __init__(
        self,
        model: str,
        wanted: CompletionRequest,
        options: Options,
        prompts: Sequence[Sequence[TokenId]],
        echoes: Sequence[str],
    ) -> None:
        self._wanted, self._options = wanted, options
        self._frame = _Frame(model, "text_completion", "cmpl")
        self._n_prompts = [len(prompt) for prompt in prompts]
        self._echoes = list(echoes)
        self._n_predicted = [0] * len(prompts)
        self._live = [payload.LiveTimings(n, monotonic) for n in self._n_prompts]
        self._timings: list[Timings] = []

    def encode(self, index: int, event: sse.Event) -> bytes:
        """Write an event of one output."""
        if isinstance(event, Chunk):
            return self._chunk(index, event).encode()
        if isinstance(event, Finished):
            return self._last(index, event).encode()
        assert isinstance(event, Progress)
        self._live[index].on_progress(event)
        if not self._wanted.return_progress:
            return b""
        extra = {"prompt_progress": payload.progress(event)}
        return self._frame.chunk(self._choice(index, ""), **extra).encode()

    def end(self) -> bytes:
        """Write the usage, where it was asked for, and the last line."""
        if not self._wanted.stream_options.include_usage:
            return sse.DONE
        usage = payload.usage(sum(self._n_prompts), self._timings)
        return self._frame.chunk("", usage=usage).encode() + sse.DONE

    def _chunk(self, index: int, event: Chunk) -> str:
        self._n_predicted[index] += len(event.tokens)
        if not event.text and not event.probs:
            return ""
        probs = logprobs_of(event.probs, self._wanted, self._options) if event.probs else None
        choice = self._choice(index, event.text, logprobs=probs)
        if not self._wanted.timings_per_token:
            return self._frame.chunk(choice)
        live = self._live[index].at(self._n_predicted[index])
        return self._frame.chunk(choice, timings=payload.timings(live))

    def _last(self, index: int, event: Finished) -> str:
        self._timings.append(event.timings)
        choice = self._choice(index, "", finish=payload.finish_reason(event.reason))
        extra = {"timings": payload.timings(event.timings)}
        if not self._wanted.stream_options.include_usage:
            extra["usage"] = payload.usage(self._n_prompts[index], [event.timings])
        return self._frame.chunk(choice, **extra)

    def _choice(
        self,
        index: int,
        text: str,
        *,
        logprobs: dict[str, Any] | None = None,
        finish: str | None = None,
    ) -> str:
        text, self._echoes[index] = self._echoes[index] + text, ""
        return sse.encode(
            {"text": text, "index": index, "logprobs": logprobs, "finish_reason": finish}
        )
