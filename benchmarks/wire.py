"""The two HTTP APIs that are measured: what goes out, and what the answers say.

`chat` is OpenAI's ``/v1/chat/completions``, `completion` llama-server's own ``/completion``.
Answers are read after the measurement, from the bytes that the driver kept.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from benchmarks.driver import Outcome, Request
from benchmarks.http1 import payloads

APIS = ("chat", "completion")


@attrs.frozen(kw_only=True)
class Shape:
    """The form of requests: the API, the length of the output, and more fields."""

    api: str = attrs.field(default="chat", validator=attrs.validators.in_(APIS))
    max_tokens: int = 64
    ignore_eos: bool = True
    model: str = "benchmark"
    api_key: str = attrs.field(default="", repr=False)
    more: Mapping[str, object] = attrs.field(factory=dict)  # fields sent as they are

    def request(self, prompt: str, *, system: str = "") -> Request:
        """Make a streamed request that continues the prompt."""
        if self.api == "chat":
            messages = [{"role": "system", "content": system}] if system else []
            return self.chat([*messages, {"role": "user", "content": prompt}])
        text = f"{system} {prompt}" if system else prompt
        return self._post("/completion", {"prompt": text, "n_predict": self.max_tokens})

    def chat(self, messages: Sequence[Mapping[str, Any]]) -> Request:
        """Make a streamed request that answers a chat."""
        body = {
            "model": self.model,
            "messages": messages,
            "max_tokens": self.max_tokens,
            "stream_options": {"include_usage": True},
        }
        return self._post("/v1/chat/completions", body)

    def _post(self, path: str, fields: Mapping[str, object]) -> Request:
        body = {**fields, "stream": True, "temperature": 0.0}
        if self.ignore_eos:
            body["ignore_eos"] = True
        headers = (("Authorization", f"Bearer {self.api_key}"),) if self.api_key else ()
        return Request("POST", path, json.dumps({**body, **self.more}).encode(), headers)


@attrs.frozen(kw_only=True)
class Stream:
    """One streamed answer, understood. Times are in seconds.

    `at` holds the arrival of each event that carried output, counted from `sent`. `counted` is
    False when the server reported no number of tokens, and events were counted in their place.
    `prefilled` is -1 where the server does not say.
    """

    client: int
    sent: float
    total: float
    error: str
    at: tuple[float, ...]
    tokens: int
    counted: bool
    prompt_tokens: int
    prefilled: int

    @property
    def ttft(self) -> float:
        """Seconds to the first event with output."""
        return self.at[0]

    @property
    def gaps(self) -> list[float]:
        """Seconds between two events with output."""
        return [after - before for before, after in itertools.pairwise(self.at)]


def _has_output(event: dict[str, Any]) -> bool:
    if event.get("content"):
        return True
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        fields = ("content", "reasoning_content", "reasoning", "tool_calls")
        if any(delta.get(name) for name in fields) or choice.get("text"):
            return True
    return False


def _error_of(event: object) -> str:
    if isinstance(event, dict) and event.get("error"):
        error = event["error"]
        message = error.get("message", error) if isinstance(error, dict) else error
        return str(message)[:300]
    return ""


def understand(outcome: Outcome) -> Stream:
    """Read an answer of either API. What is wrong with it ends up in `Stream.error`."""
    error = outcome.error
    if not error and outcome.status != 200:
        error = f"HTTP {outcome.status}: {_plain_error(outcome.body)}"
    elif not error and not outcome.sse:
        error = "the answer is no event stream"
    at: list[float] = []
    usage: dict[str, Any] = {}
    timings: dict[str, Any] = {}
    ended = False
    native: dict[str, Any] = {}
    # `times` is empty unless the answer is SSE; then it counts the events of `body` exactly.
    for when, data in zip(outcome.times, payloads(outcome.body), strict=False):
        if data == b"[DONE]":
            ended = True
            continue
        try:
            event = json.loads(data)
        except ValueError:
            error = error or f"an event is not JSON: {data[:80]!r}"
            continue
        if not isinstance(event, dict):
            error = error or f"an event is not an object: {data[:80]!r}"
            continue
        error = error or _error_of(event)
        if _has_output(event):
            at.append(when - outcome.sent)
        usage = event.get("usage") or usage
        timings = event.get("timings") or timings
        if event.get("stop") is True:
            ended, native = True, event
    if not error and not ended:
        error = "the stream ended without its last event"
    elif not error and not at:
        error = "no event carried output"
    tokens = _first(usage.get("completion_tokens"), timings.get("predicted_n"))
    return Stream(
        client=outcome.client,
        sent=outcome.sent,
        total=outcome.ended - outcome.sent,
        error=error,
        at=tuple(at),
        tokens=_first(tokens, native.get("tokens_predicted"), len(at)),
        counted=tokens is not None or "tokens_predicted" in native,
        prompt_tokens=_first(usage.get("prompt_tokens"), native.get("tokens_evaluated"), -1),
        prefilled=_first(timings.get("prompt_n"), -1),
    )


def answer_of(outcome: Outcome) -> tuple[str, list[int]]:
    """Return the text of an answer, and the tokens of ``/completion`` if they were asked for."""
    text: list[str] = []
    tokens: list[int] = []
    for data in payloads(outcome.body):
        try:
            event = json.loads(data)
        except ValueError:  # [DONE], or what `understand` calls an error
            continue
        if isinstance(event, dict) and not event.get("stop"):
            text.append(event.get("content") or "")
            for choice in event.get("choices") or ():
                text.append((choice.get("delta") or {}).get("content") or "")
            tokens += event.get("tokens") or ()
    return "".join(text), tokens


def understand_all(outcomes: Sequence[Outcome]) -> list[Stream]:
    """Read many answers."""
    return [understand(outcome) for outcome in outcomes]


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _plain_error(body: bytes) -> str:
    try:
        return _error_of(json.loads(body)) or body[:200].decode(errors="replace")
    except ValueError:
        return body[:200].decode(errors="replace")
