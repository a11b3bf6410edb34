"""A batch of short chats: beside clients that send as many, and beside a stream."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from benchmarks.driver import Plan, Request
from benchmarks.scenarios import Settings, Streams, plural
from benchmarks.servers import BASE, Target, TargetError, ask
from benchmarks.stats import Metric, Sample, joined, quotient
from trioserve.bench.prompts import words

_BATCHES, _CHATS = "/v1/messages/batches", "/v1/messages"
_BOTH = "batch / clients"
_STREAM = "stream beside a batch / alone"


@attrs.frozen
class Batch:
    """A batch, clients that send the same number of chats, and a stream, alone and beside a batch.

    All chats of a run have one system prompt. The clients send one chat after another, and read
    whole answers, as those of a batch are.
    """

    settings: Settings
    clients: int = 8
    chats: int = 200
    stream_tokens: int = 400

    metrics = (
        Metric(_BOTH, "", more_is_better=True),
        Metric("tokens/s", "", more_is_better=True),
        Metric(_STREAM, "", more_is_better=True),
    )

    @property
    def name(self) -> str:
        """Such as "a batch of 200 chats, and 8 clients"."""
        return f"a batch of {self.chats} chats, and {plural(self.clients, 'client')}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once. Raises TargetError: the batch does not end."""
        if target.name == BASE:
            return Sample(numbers={}, notes=("it has no batches",))
        batch, clients = self._by_batch(target, f"{seed} a"), self._by_clients(target, f"{seed} b")
        stream = Streams(self.settings.having(max_tokens=self.stream_tokens), 1)
        alone = stream.measure(target, f"{seed} c")
        with self._batch(target, f"{seed} d") as is_over:
            beside = stream.measure(target, f"{seed} e")
            if is_over():
                raise TargetError(f"{target.name}: the batch was over before the stream")
        numbers = quotient(_BOTH, batch, clients) | quotient(_STREAM, beside, alone)
        return joined(batch, clients, alone, beside, **numbers)

    def _bodies(self, seed: str) -> list[dict[str, Any]]:
        """Make the requests. Two seeds have nothing in common that could be cached."""
        common = {"model": "benchmark", "max_tokens": 32, "system": words(48, f"{seed} system")}
        questions = [words(12, f"{seed} {n}") for n in range(self.chats)]
        return [{**common, "messages": [{"role": "user", "content": q}]} for q in questions]

    @contextmanager
    def _batch(self, target: Target, seed: str) -> Iterator[Any]:
        """Run a batch in the block, which may end before it; yields whether it is over."""
        path = self._begin(target, seed)
        try:
            yield lambda: _has_ended(target, path)
        finally:
            ask(target, "POST", f"{path}/cancel", {})

    def _begin(self, target: Target, seed: str) -> str:
        """Begin a batch; returns its path."""
        lines = [{"custom_id": f"{n}", "params": one} for n, one in enumerate(self._bodies(seed))]
        batch = json.loads(ask(target, "POST", _BATCHES, {"requests": lines}))
        return f"{_BATCHES}/{batch['id']}"

    def _by_batch(self, target: Target, seed: str) -> Sample:
        began, until = time.perf_counter(), time.monotonic() + self.settings.max_time
        path = self._begin(target, seed)
        while not _has_ended(target, path):
            if time.monotonic() > until:
                raise TargetError(f"{target.name}: the batch does not end")
            time.sleep(0.1)
        text = ask(target, "GET", f"{path}/results", timeout=60)
        seconds = time.perf_counter() - began
        results = [json.loads(line)["result"] for line in text.splitlines()]
        answers = [one["message"] for one in results if one["type"] == "succeeded"]
        return self._sample(answers, seconds)

    def _by_clients(self, target: Target, seed: str) -> Sample:
        requests = [Request("POST", _CHATS, json.dumps(one).encode()) for one in self._bodies(seed)]
        plans = [Plan(requests=requests[n :: self.clients]) for n in range(self.clients)]
        began = time.perf_counter()
        outcomes = self.settings.run(target, plans).outcomes
        seconds = time.perf_counter() - began
        good = [one for one in outcomes if one.status == 200 and not one.error]
        return self._sample([json.loads(one.body) for one in good], seconds)

    def _sample(self, answers: list[dict[str, Any]], seconds: float) -> Sample:
        tokens = sum(one["usage"]["output_tokens"] for one in answers)
        return Sample(
            numbers={"tokens/s": tokens / seconds},
            requests=self.chats,
            failed=self.chats - len(answers),
        )


def _has_ended(target: Target, path: str) -> bool:
    return bool(json.loads(ask(target, "GET", path))["processing_status"] == "ended")
