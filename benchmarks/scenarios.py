"""The situations that servers are put through, one class each.

A scenario makes plans, runs them against one target, and turns the outcomes into numbers. Its
`measure` is called again for each round, and for each server in turn. `many`, `chats`, `cancel`
and `pair` have more of them, and `rows` has what is expected of each.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import attrs

from benchmarks.driver import Outcome, Plan, Request, Run, run
from benchmarks.servers import (
    Target,
    ask,
    busy,
    cpu_of,
    pss_of,
    runtime_of,
    switches_of,
    syscalls_of,
    tokens_per_word,
)
from benchmarks.stats import STREAM_METRICS, Metric, Sample, joined, quotient, sample_of
from benchmarks.wire import Shape, Stream, answer_of, understand, understand_all
from trioserve.bench.prompts import words
from trioserve.bench.stats import percentile


def plural(count: int, noun: str) -> str:
    """Return such as "8 streams"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def _not_started(target: Target) -> AbstractContextManager[Target]:
    raise ValueError(f"{target.name}: this scenario starts its own servers")


@attrs.frozen(kw_only=True)
class Settings:
    """Common settings of scenarios. `words_per_token` makes prompts of a given length."""

    shape: Shape = attrs.field(factory=Shape)
    words_per_token: float = 1.0
    slots: int = 8
    max_time: float = 300.0  # seconds for a run
    #: Starts the server that has the name of a target, for scenarios that need a fresh one.
    start: Callable[[Target], AbstractContextManager[Target]] = _not_started

    def prompt(self, tokens: int, seed: str) -> str:
        """Return a prompt of about that many tokens."""
        return words(max(1, round(tokens * self.words_per_token)), seed)

    def run(
        self, target: Target, plans: Sequence[Plan], before_close: Callable[[], None] = lambda: None
    ) -> Run:
        """Run plans within the time limit."""
        limit = self.max_time
        return run(target.address, plans, timeout=limit, max_time=limit, before_close=before_close)

    def having(self, **changes: Any) -> Settings:
        """Return the settings with another shape of requests."""
        return attrs.evolve(self, shape=attrs.evolve(self.shape, **changes))

    def fit(self, target: Target) -> Settings:
        """Return the settings with the length of a server's tokens.

        Raises:
            TargetError: the server does not answer.
        """
        length = tokens_per_word(target, api_key=self.shape.api_key)
        return attrs.evolve(self, words_per_token=1 / length)


@attrs.frozen
class Streams:
    """Clients that each stream a few answers, one after the other, with different prompts."""

    settings: Settings
    clients: int
    requests: int = 1
    prompt_tokens: int = 32
    prompt_words: int = 0  # in place of tokens
    title: str = ""

    metrics = (
        *STREAM_METRICS,
        Metric("wall s", "s", digits=2),
        Metric("server cpu/token", "ms", digits=2),  # with its children
        Metric("own cpu/event", "us", digits=0),  # without them: of a router, its own work
    )

    @property
    def name(self) -> str:
        """Such as "8 streams, 64 tokens"."""
        tokens = self.settings.shape.max_tokens
        return self.title or f"{plural(self.clients, 'stream')}, {tokens} tokens"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        pid = target.pid
        before = (cpu_of(pid), cpu_of(pid, children=False)) if pid is not None else None
        result = self.settings.run(target, self.plans(seed))
        shape = self.settings.shape
        sample = sample_of(
            result,
            planned=self.clients * self.requests,
            expected_tokens=shape.max_tokens if shape.ignore_eos else 0,
        )
        if pid is not None and before is not None and sample.numbers.get("tokens"):
            used, own = cpu_of(pid) - before[0], cpu_of(pid, children=False) - before[1]
            sample.numbers["server cpu/token"] = used / sample.numbers["tokens"] * 1e3
            sample.numbers["own cpu/event"] = own / result.events * 1e6
        return sample

    def plans(self, seed: str) -> list[Plan]:
        """Make the plans of one round. The same seed makes the same prompts."""
        return [
            Plan(
                requests=[
                    self.settings.shape.request(self._prompt(f"{seed} {client} {number}"))
                    for number in range(self.requests)
                ]
            )
            for client in range(self.clients)
        ]

    def _prompt(self, seed: str) -> str:
        if self.prompt_words:
            return words(self.prompt_words, seed)
        return self.settings.prompt(self.prompt_tokens, seed)


def first_requests(settings: Settings) -> Streams:
    """Return what a server is warmed up with."""
    return Streams(settings.having(max_tokens=16), 1, 2)


@attrs.frozen
class SharedPrefix:
    """Cold requests that arrive together and share a long system prompt.

    One request with another prompt of that length goes first: its TTFT is one prefill.
    """

    settings: Settings
    clients: int = 8
    shared_tokens: int = 1000
    own_tokens: int = 16
    max_tokens: int = 16

    metrics = (
        Metric("one prefill", "ms"),
        Metric("ttft p50", "ms"),
        Metric("ttft p99", "ms"),
        Metric("ttft p99 / one prefill", "", digits=2),
        Metric("wall s", "s", digits=2),
        Metric("prefilled tokens", "", digits=0),
    )

    @property
    def name(self) -> str:
        """Such as "8 requests sharing 1000 tokens"."""
        return f"{plural(self.clients, 'request')} sharing {self.shared_tokens} tokens"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        settings = self.settings.having(max_tokens=self.max_tokens)

        def plan(prefix: str, number: int) -> Plan:
            own = settings.prompt(self.own_tokens, f"{seed} own {number}")
            system = settings.prompt(self.shared_tokens, prefix)
            return Plan(requests=[settings.shape.request(own, system=system)])

        first = sample_of(settings.run(target, [plan(f"{seed} alone", -1)]), planned=1)
        plans = [plan(f"{seed} shared", number) for number in range(self.clients)]
        sample = sample_of(
            settings.run(target, plans), planned=self.clients, expected_tokens=self.max_tokens
        )
        if first.failed or sample.failed:
            return joined(attrs.evolve(sample, numbers={}), first)
        prefill = first.numbers["ttft p50"]
        share = sample.numbers["ttft p99"] / prefill
        return joined(sample, first, **{"one prefill": prefill, "ttft p99 / one prefill": share})


@attrs.frozen
class LongPrompt:
    """A long prompt that arrives while others decode.

    The others' gaps before it was sent are the baseline; those that end between then and its first
    token are the stall.
    """

    settings: Settings
    decoding: int = 4
    prompt_tokens: int = 3000
    max_tokens: int = 400
    after_events: int = 40

    metrics = (
        Metric("itl p50 before", "ms", digits=2),
        Metric("itl p99 meanwhile", "ms"),
        Metric("longest stall", "ms"),
        Metric("p99 meanwhile / p50 before", "", digits=1),
        Metric("long prompt ttft", "ms"),
    )

    @property
    def name(self) -> str:
        """Such as "4 streams, then a prompt of 3000 tokens"."""
        return f"{plural(self.decoding, 'stream')}, then a prompt of {self.prompt_tokens} tokens"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        settings = self.settings.having(max_tokens=self.max_tokens)
        plans = Streams(settings, self.decoding, prompt_tokens=16).plans(seed)
        late = settings.having(max_tokens=8).shape.request(
            settings.prompt(self.prompt_tokens, f"{seed} long")
        )
        plans.append(Plan(requests=[late], after_events=self.after_events))
        result = settings.run(target, plans)
        sample = sample_of(result, planned=len(plans))
        if sample.failed:
            return attrs.evolve(sample, numbers={})
        streams = understand_all(result.outcomes)
        last = next(stream for stream in streams if stream.client == self.decoding)
        others = [stream for stream in streams if stream.client != self.decoding]
        return attrs.evolve(sample, numbers=_stalls(others, last))


def _stalls(others: Sequence[Stream], late: Stream) -> dict[str, float]:
    """Return the numbers of `LongPrompt`: gaps before the late request and during its prefill."""
    before: list[float] = []
    during: list[float] = []
    end = late.sent + late.ttft
    for stream in others:
        for arrival, gap in zip(stream.at[1:], stream.gaps, strict=True):
            when = stream.sent + arrival
            if when <= late.sent:
                before.append(gap * 1e3)
            elif when - gap <= end:
                during.append(gap * 1e3)
    median, worst = percentile(before, 0.5), percentile(during, 0.99)
    numbers = {
        "itl p50 before": median,
        "itl p99 meanwhile": worst,
        "longest stall": max(during, default=math.nan),
        "p99 meanwhile / p50 before": worst / median if median else math.nan,
        "long prompt ttft": late.ttft * 1e3,
    }
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


class _Dialog:
    """One chat of several turns: each answer goes back with the next question."""

    def __init__(self, shape: Shape, questions: Sequence[str]) -> None:
        self._shape = shape
        self._questions = list(reversed(questions))
        self._messages: list[dict[str, Any]] = []
        self.outcomes: list[Outcome] = []

    def request(self) -> Request:
        self._messages.append({"role": "user", "content": self._questions.pop()})
        return self._shape.chat(self._messages)

    def then(self, outcome: Outcome) -> Request | None:
        self.outcomes.append(outcome)
        self._messages.append({"role": "assistant", "content": answer_of(outcome)[0]})
        return self.request() if self._questions else None


@attrs.frozen
class Turns:
    """Clients that each hold one chat of several turns, without pauses."""

    settings: Settings
    clients: int
    turns: int = 5
    user_tokens: int = 35

    metrics = (
        Metric("wall s", "s", digits=2),
        Metric("tokens/s", "", more_is_better=True),
        Metric("ttft p50", "ms"),
        Metric("later ttft p50", "ms"),
        Metric("itl p99", "ms"),
        Metric("prefilled tokens", "", digits=0),
    )

    @property
    def name(self) -> str:
        """Such as "8 chats of 5 turns, at once"."""
        return f"{plural(self.clients, 'chat')} of {self.turns} turns, at once"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        settings = self.settings
        dialogs = []
        for client in range(self.clients):
            seeds = [f"{seed} {client} {turn}" for turn in range(self.turns)]
            questions = [settings.prompt(self.user_tokens, each) for each in seeds]
            dialogs.append(_Dialog(settings.shape, questions))
        plans = [Plan(requests=[dialog.request()], then=dialog.then) for dialog in dialogs]
        sample = sample_of(
            settings.run(target, plans),
            planned=self.clients * self.turns,
            expected_tokens=settings.shape.max_tokens,
        )
        later = [understand(one) for dialog in dialogs for one in dialog.outcomes[1:]]
        if ttfts := [stream.ttft * 1e3 for stream in later if not stream.error]:
            sample.numbers["later ttft p50"] = percentile(ttfts, 0.5)
        return sample


@attrs.frozen
class Embeddings:
    """Texts to embed: in one request, or one in each request of several clients."""

    settings: Settings
    clients: int
    texts: int = 64
    text_tokens: int = 45

    metrics = (Metric("texts/s", "", more_is_better=True), Metric("latency p50", "ms"))

    @property
    def name(self) -> str:
        """Such as "64 texts from 8 clients"."""
        return f"{self.texts} texts from {plural(self.clients, 'client')}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        seeds = [f"{seed} {number}" for number in range(self.texts)]
        texts = [self.settings.prompt(self.text_tokens, each) for each in seeds]
        if self.clients == 1:
            plans = [Plan(requests=[_embedding(texts)])]
        else:
            shares = [texts[client :: self.clients] for client in range(self.clients)]
            plans = [Plan(requests=list(map(_embedding, share))) for share in shares]
        return answered(
            self.settings.run(target, plans), sum(len(plan.requests) for plan in plans),
            lambda wall: {"texts/s": self.texts / wall},
        )  # fmt: skip


def _embedding(given: str | list[str]) -> Request:
    body = {"model": "benchmark", "input": given}
    return Request("POST", "/v1/embeddings", json.dumps(body).encode())


def answered(result: Run, planned: int, rates: Callable[[float], dict[str, float]]) -> Sample:
    """Turn a run of whole answers into a sample; `rates` makes numbers from the seconds."""
    good = [one for one in result.outcomes if not one.error and one.status == 200]
    bad = {one.error or f"HTTP {one.status}: {one.body[:100]!r}" for one in result.outcomes}
    bad -= {one.error or f"HTTP {one.status}: {one.body[:100]!r}" for one in good}
    if len(good) < planned:
        failed = planned - len(good)
        return Sample(numbers={}, requests=planned, failed=failed, errors=tuple(sorted(bad))[:10])
    times = [(one.ended - one.sent) * 1e3 for one in good]
    shares = {f"latency p{share}": percentile(times, share / 100) for share in (50, 99)}
    return Sample(numbers=rates(result.wall) | shares, requests=planned)


_ITEM = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer", "minimum": 0, "maximum": 9999},
        "kind": {"enum": ["red", "green", "blue"]},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 8}, "maxItems": 3},
    },
    "required": ["name", "count", "kind", "tags"],
    "additionalProperties": False,
}
#: Enough items that no output of a benchmark reaches the end: both runs have the same length.
SCHEMA = {"type": "array", "items": _ITEM, "minItems": 200, "maxItems": 200}


@attrs.frozen
class Structured:
    """Streams with a schema after the same streams without; the ratio is the cost of the schema.

    A first request compiles the schema; it is measured by itself.
    """

    settings: Settings
    clients: int = 8

    metrics = (
        Metric("schema / plain", "", more_is_better=True, digits=3),
        Metric("tokens/s", "", more_is_better=True),
        Metric("ttft p50", "ms"),
        Metric("itl p50", "ms", digits=2),
        Metric("first ttft", "ms"),
    )

    @property
    def name(self) -> str:
        """Such as "8 streams with a JSON Schema"."""
        return f"{plural(self.clients, 'stream')} with a JSON Schema"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        plain = self.settings.having(api="completion")
        # No `ignore_eos`: the schema does not let the output end, and the field would be a bias
        # on top of it.
        schema = plain.having(ignore_eos=False, more={"json_schema": SCHEMA})
        request = schema.having(max_tokens=4).shape.request(plain.prompt(16, seed))
        result = plain.run(target, [Plan(requests=[request])])
        first = sample_of(result, planned=1)
        if first.failed:
            return first
        text = answer_of(result.outcomes[0])[0].lstrip()
        if text and text[0] != "[":
            return Sample(numbers={}, notes=(f"the schema was not followed: {text[:40]!r}",))
        without = Streams(plain, self.clients, 2).measure(target, f"{seed} plain")
        sample = Streams(schema, self.clients, 2).measure(target, f"{seed} schema")
        sample.numbers["first ttft"] = first.numbers["ttft p50"]
        return joined(sample, without, first, **quotient("schema / plain", sample, without))


@attrs.frozen
class Beside:
    """A stream while the machine is quiet, and another from the moment others are busy.

    Before the first, one is not measured: a server may have to find out that the others are gone.
    """

    settings: Settings
    others: int = 1
    max_tokens: int = 256

    metrics = (
        Metric("busy / quiet", "", more_is_better=True, digits=2),
        Metric("tokens/s", "", more_is_better=True),
        Metric("itl p50", "ms", digits=2),
        Metric("itl p99", "ms"),
    )

    @property
    def name(self) -> str:
        """Such as "1 stream beside 1 busy process"."""
        return f"1 stream beside {self.others} busy process{'es' * (self.others > 1)}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        stream = Streams(self.settings.having(max_tokens=self.max_tokens), 1)
        stream.measure(target, f"{seed} first")
        quiet = stream.measure(target, f"{seed} quiet")
        with busy(self.others):
            sample = stream.measure(target, f"{seed} busy")
        return joined(sample, quiet, **quotient("busy / quiet", sample, quiet))


@attrs.frozen
class Start:
    """A server's start with a warm page cache, and its memory after one answer."""

    settings: Settings

    name = "start, page cache warm"
    metrics = (
        Metric("ready", "s", digits=2),
        Metric("cpu until ready", "s", digits=2),
        Metric("PSS", "MB"),
        Metric("of this, no file's", "MB"),
    )

    def measure(self, target: Target, seed: str) -> Sample:
        """Start once."""
        began = time.monotonic()
        with self.settings.start(target) as server:
            ready = time.monotonic() - began
            assert server.pid is not None
            used = cpu_of(server.pid)
            body = {"prompt": "Once upon a time", "n_predict": 64, "ignore_eos": True}
            ask(server, "POST", "/completion", body, timeout=120.0)
            whole, anonymous = pss_of(server.pid)
        numbers = {"ready": ready, "cpu until ready": used, "PSS": whole}
        return Sample(numbers={**numbers, "of this, no file's": anonymous}, requests=1)


@attrs.frozen
class Idle:
    """A server without requests, after its first answers."""

    settings: Settings
    seconds: float = 10.0

    metrics = (
        Metric("cpu", "ms", digits=1),
        Metric("sleeps", "", digits=0),
        Metric("system calls", "", digits=0),
    )

    @property
    def name(self) -> str:
        """Such as "idle for 10 s"."""
        return f"idle for {self.seconds:g} s"

    def measure(self, target: Target, seed: str) -> Sample:
        """Wait once, and once more to count system calls, where strace is installed."""
        assert target.pid is not None
        time.sleep(1.0)  # for what follows an answer
        before = runtime_of(target.pid), switches_of(target.pid)
        time.sleep(self.seconds)
        after = runtime_of(target.pid), switches_of(target.pid)
        cpu = (after[0] - before[0]) * 1e3
        numbers = {"cpu": cpu, "sleeps": float(after[1] - before[1])}
        if (calls := syscalls_of(target.pid, self.seconds)) is not None:
            numbers["system calls"] = calls
        return Sample(numbers=numbers)
