"""What people do with a server: short chats of several turns, an editor's completions, embeddings.

Each prompt is new; only the turns of one chat repeat the turns before them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from typing import Any

import attrs

from benchmarks.plan import CANCELLED, Outcome, Plan, Request
from benchmarks.scenarios import Settings
from benchmarks.stats import Metric, Sample, sample_of
from benchmarks.targets import Target
from benchmarks.wire import Shape, answer_of, understand
from trioserve.bench.stats import percentile


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
        return f"{self.clients} chat{'s' * (self.clients > 1)} of {self.turns} turns, at once"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        settings = self.settings
        dialogs = [
            _Dialog(
                settings.shape,
                [
                    settings.prompt(self.user_tokens, f"{seed} {client} {turn}")
                    for turn in range(self.turns)
                ],
            )
            for client in range(self.clients)
        ]
        plans = [Plan(requests=[dialog.request()], then=dialog.then) for dialog in dialogs]
        result = settings.run(target, plans)
        planned, expected = self.clients * self.turns, settings.shape.max_tokens
        sample = sample_of(result, planned=planned, expected_tokens=expected)
        later = [understand(one) for dialog in dialogs for one in dialog.outcomes[1:]]
        if ttfts := [stream.ttft * 1e3 for stream in later if not stream.error]:
            sample.numbers["later ttft p50"] = percentile(ttfts, 0.5)
        return sample


@attrs.frozen
class Editor:
    """Completions as an editor asks for them: a key press cancels many of them."""

    settings: Settings
    clients: int = 8
    requests: int = 10
    prompt_tokens: int = 400
    max_tokens: int = 24
    cancelled: float = 0.4
    longest: float = 0.08  # seconds until a cancelled request is given up

    metrics = (
        Metric("wall s", "s", digits=2),
        Metric("ttft p50", "ms"),
        Metric("latency p99", "ms"),
        Metric("tokens/s", "", more_is_better=True),
    )

    @property
    def name(self) -> str:
        """Such as "8 editors"."""
        return f"{self.clients} editor{'s' * (self.clients > 1)}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        shape = attrs.evolve(self.settings.with_tokens(self.max_tokens), api="completion")
        rng = random.Random(seed)

        def request(number: str) -> Request:
            made = shape.request(self.settings.prompt(self.prompt_tokens, number))
            if rng.random() < self.cancelled:
                return attrs.evolve(made, cancel_after=rng.uniform(0.005, self.longest))
            return made

        plans = [
            Plan(requests=[request(f"{seed} {client} {n}") for n in range(self.requests)])
            for client in range(self.clients)
        ]
        result = self.settings.run(target, plans)
        whole = tuple(one for one in result.outcomes if one.error != CANCELLED)
        n_cancelled = len(result.outcomes) - len(whole)
        sample = sample_of(
            attrs.evolve(result, outcomes=whole),
            planned=self.clients * self.requests - n_cancelled,
            expected_tokens=self.max_tokens,
        )
        sample.numbers["wall s"] = result.wall
        return sample


@attrs.frozen
class Embeddings:
    """Texts to embed: in one request, or one in each request of several clients."""

    settings: Settings
    clients: int
    texts: int = 64
    text_tokens: int = 45

    metrics = (
        Metric("texts/s", "", more_is_better=True),
        Metric("latency p50", "ms"),
    )

    @property
    def name(self) -> str:
        """Such as "64 texts from 8 clients"."""
        return f"{self.texts} texts from {self.clients} client{'s' * (self.clients > 1)}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        texts = [
            self.settings.prompt(self.text_tokens, f"{seed} {number}")
            for number in range(self.texts)
        ]
        bodies: list[list[Any]] = [[texts]] if self.clients == 1 else [
            list(texts[client :: self.clients]) for client in range(self.clients)
        ]  # fmt: skip
        plans = [Plan(requests=[_embedding(given) for given in own]) for own in bodies]
        result = self.settings.run(target, plans)
        failed = [one for one in result.outcomes if one.error or one.status != 200]
        planned = sum(map(len, bodies))
        if failed or len(result.outcomes) < planned:
            errors = {one.error or f"HTTP {one.status}" for one in failed}
            n_missing = planned - len(result.outcomes)
            return Sample(
                numbers={},
                requests=planned,
                failed=len(failed) + n_missing,
                errors=tuple(sorted(errors)),
            )
        times = [(one.ended - one.sent) * 1e3 for one in result.outcomes]
        numbers = {"texts/s": self.texts / result.wall, "latency p50": percentile(times, 0.5)}
        return Sample(numbers=numbers, requests=planned)


def _embedding(given: Any) -> Request:
    body = {"model": "benchmark", "input": given}
    return Request("POST", "/v1/embeddings", json.dumps(body).encode())
