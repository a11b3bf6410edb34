"""The situations that servers are put through, one class each.

A scenario makes plans, runs them against one target, and turns the outcomes into numbers. The
harness repeats it, alternating between the targets. A new scenario is a class with `name`,
`metrics` and `measure`, and a line in `catalogue.SCENARIOS`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

import attrs

from benchmarks.driver import run
from benchmarks.harness import usage
from benchmarks.load import Load
from benchmarks.plan import UNFINISHED, Plan, Request, Run
from benchmarks.stats import STREAM_METRICS, Metric, Sample, error_kinds, sample_of
from benchmarks.targets import Target
from benchmarks.wire import Shape, Stream, understand, understand_all
from trioserve.bench.prompts import words
from trioserve.bench.stats import percentile


class Scenario(Protocol):
    """What the harness needs of a scenario."""

    @property
    def name(self) -> str:
        """The title of its table."""

    @property
    def metrics(self) -> Sequence[Metric]:
        """The numbers that go into the table."""

    def measure(self, target: Target, seed: str) -> Sample:
        """Run it once. The same seed gives every target the same prompts."""


#: Seconds after which a `/health` request that the end of the run cut off counts as unanswered.
PROBE_TIMEOUT = 0.5


@attrs.frozen(kw_only=True)
class Settings:
    """What the scenarios have in common. `words_per_token` makes prompts of a given length."""

    shape: Shape = attrs.field(factory=Shape)
    words_per_token: float = 1.0
    slots: int = 8
    requests: int = 2
    timeout: float = 120.0
    max_time: float = 300.0

    def prompt(self, tokens: int, seed: str) -> str:
        """Return a prompt of about that many tokens."""
        return words(max(1, round(tokens * self.words_per_token)), seed)

    def run(
        self,
        target: Target,
        plans: Sequence[Plan],
        before_close: Callable[[], None] = lambda: None,
    ) -> Run:
        """Run plans within the time limits."""
        return run(
            target.address,
            plans,
            timeout=self.timeout,
            max_time=self.max_time,
            before_close=before_close,
        )

    def with_tokens(self, count: int) -> Shape:
        """Return the shape of requests that generate that many tokens."""
        return attrs.evolve(self.shape, max_tokens=count)


@attrs.frozen
class Streams:
    """Clients that each stream a few answers, one after the other, with different prompts.

    With more clients than slots it shows how the server queues.
    """

    settings: Settings
    clients: int
    requests: int
    prompt_tokens: int = 32

    metrics = (
        *STREAM_METRICS,
        Metric("wall s", "s", digits=2),
        Metric("server cpu/token", "ms", digits=2),
    )

    @property
    def name(self) -> str:
        """Such as "8 streams"."""
        plural = "s" if self.clients > 1 else ""
        name = f"{self.clients} stream{plural}, {self.settings.shape.max_tokens} tokens"
        if self.prompt_tokens == 32:
            return name
        return f"{name}, {self.requests} each after {self.prompt_tokens} tokens"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        before = usage(target.pid) if target.pid is not None else None
        sample = Load(
            clients=self.clients,
            requests=self.requests,
            prompt_words=max(1, round(self.prompt_tokens * self.settings.words_per_token)),
            shape=self.settings.shape,
            timeout=self.settings.timeout,
            max_time=self.settings.max_time,
        ).measure(target, seed)
        after = usage(target.pid) if target.pid is not None else None
        if before is not None and after is not None and sample.numbers.get("tokens"):
            cpu = after.cpu - before.cpu
            sample.numbers["server cpu/token"] = cpu / sample.numbers["tokens"] * 1e3
        return sample


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
        return f"{self.clients} requests sharing {self.shared_tokens} tokens"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        settings = self.settings
        shape = settings.with_tokens(self.max_tokens)

        def request(prefix: str, number: int) -> Request:
            own = settings.prompt(self.own_tokens, f"{seed} own {number}")
            return shape.request(own, system=settings.prompt(self.shared_tokens, prefix))

        alone = settings.run(target, [Plan(requests=[request(f"{seed} alone", -1)])])
        first = understand(alone.outcomes[0])
        plans = [Plan(requests=[request(f"{seed} shared", n)]) for n in range(self.clients)]
        sample = sample_of(
            settings.run(target, plans), planned=self.clients, expected_tokens=self.max_tokens
        )
        if first.error:
            failed, errors = sample.failed + 1, (*sample.errors, f"alone: {first.error}")
            return attrs.evolve(sample, requests=1 + sample.requests, failed=failed, errors=errors)
        prefill = first.ttft * 1e3
        sample.numbers["one prefill"] = prefill
        if "ttft p99" in sample.numbers:
            sample.numbers["ttft p99 / one prefill"] = sample.numbers["ttft p99"] / prefill
        return attrs.evolve(sample, requests=1 + sample.requests)


@attrs.frozen
class LongPrompt:
    """A long prompt that arrives while others decode: how long do they stall?

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
        return f"{self.decoding} streams, then a prompt of {self.prompt_tokens} tokens"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        settings, shape = self.settings, self.settings.with_tokens(self.max_tokens)
        plans = [
            Plan(requests=[shape.request(settings.prompt(16, f"{seed} {number}"))])
            for number in range(self.decoding)
        ]
        late = settings.with_tokens(8).request(settings.prompt(self.prompt_tokens, f"{seed} long"))
        plans.append(Plan(requests=[late], after_events=self.after_events))
        result = settings.run(target, plans)
        sample = sample_of(result, planned=len(plans))
        streams = understand_all(result.outcomes)
        if sample.failed:
            return attrs.evolve(sample, numbers={})
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


@attrs.frozen
class Connections:
    """Very many connections while all slots decode: their memory, and whether ``/health`` answers.

    With `waiting`, each connection has sent a request that is queued; else it has sent nothing.
    """

    settings: Settings
    count: int = 1000
    waiting: bool = False
    max_tokens: int = 400
    settle: float = 2.0  # seconds for the many to connect, before the probes begin

    metrics = (
        Metric("health p50", "ms", digits=2),
        Metric("health p99", "ms"),
        Metric("memory/connection", "KB"),
        Metric("tokens/s", "", more_is_better=True),
    )

    @property
    def name(self) -> str:
        """Such as "1000 idle connections"."""
        return f"{self.count} {'waiting requests' if self.waiting else 'idle connections'}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        settings, shape = self.settings, self.settings.with_tokens(self.max_tokens)

        def request(number: int) -> Request:
            return shape.request(settings.prompt(16, f"{seed} {number}"))

        def read_memory() -> None:
            found = usage(target.pid) if target.pid is not None else None
            memory.append(found.memory if found is not None else -1)

        memory: list[int] = []
        streams = [Plan(requests=[request(number)]) for number in range(settings.slots)]
        many: list[Plan] = [Plan(hold=True, delay=0.5)] * self.count
        if self.waiting:
            many = [
                Plan(requests=[request(settings.slots + n)], background=True, delay=0.5)
                for n in range(self.count)
            ]
        probe = Plan(
            requests=[Request("GET", "/health")], background=True, pause=0.02, delay=self.settle
        )
        # The slots' own memory is there after a first round without the many.
        settings.run(target, [Plan(requests=plan.requests) for plan in streams])
        read_memory()
        plans = [*streams, probe, *many]
        result = settings.run(target, plans, read_memory)
        return self._sample(result, memory)

    def _sample(self, result: Run, memory: Sequence[int]) -> Sample:
        slots = self.settings.slots
        own = tuple(outcome for outcome in result.outcomes if outcome.client < slots)
        probes = [outcome for outcome in result.outcomes if outcome.client == slots]
        broken = [o for o in result.outcomes if o.client > slots and o.error != UNFINISHED]
        sample = sample_of(
            attrs.evolve(result, outcomes=own), planned=slots, expected_tokens=self.max_tokens
        )
        numbers, notes = sample.numbers, list(sample.notes)
        # The last probe may just have been on its way when the run ended. One that had waited for
        # long counts with that time: the truth is no better.
        probes = [o for o in probes if o.error != UNFINISHED or o.ended - o.sent > PROBE_TIMEOUT]
        times = [(probe.ended - probe.sent) * 1e3 for probe in probes]
        unanswered = sum(bool(probe.error) or probe.status != 200 for probe in probes)
        if times:
            numbers["health p50"] = percentile(times, 0.5)
            numbers["health p99"] = percentile(times, 0.99)
        if unanswered:
            notes.append(f"{unanswered} of {len(times)} /health requests had no good answer")
        if len(times) < 20:
            notes.append(f"only {len(times)} /health requests: the streams are too short")
        alive = self.count if self.waiting else result.held
        if alive < self.count:
            notes.append(f"the server closed {self.count - alive} of {self.count} connections")
        if len(memory) == 2 and min(memory) > 0 and alive:
            numbers["memory/connection"] = (memory[1] - memory[0]) / alive / 1e3
        if self.waiting:
            # Those whose turn came before the run ended are fine, whatever their number.
            broken = [outcome for outcome in broken if understand(outcome).error]
        errors = (*sample.errors, *error_kinds(map(understand, broken)))
        return attrs.evolve(
            sample,
            requests=slots + self.count,
            failed=sample.failed + len(broken),
            errors=errors,
            notes=tuple(notes),
        )
