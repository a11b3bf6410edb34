"""Many more clients than slots, of two API keys: throughput, waiting times, memory, the loop's CPU.

Each run has a fresh server, so that its memory is that of these clients. One client in eight has
the second key. A server that shares its slots evenly between keys gives half of the answers to the
second, as long as it has requests.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import attrs

from benchmarks.driver import Outcome, Plan, Run
from benchmarks.report import warm_up
from benchmarks.scenarios import Settings, Streams, answered, first_requests, plural
from benchmarks.servers import OURS, Target, loop_cpu, pss_of
from benchmarks.stats import Metric, Sample, sample_of
from benchmarks.wire import Shape

#: The keys that both servers are started with. `FEW` is that of one client in eight.
MANY, FEW = "many", "few"


class PeakMemory:
    """The greatest PSS of a server during a block, looked at four times a second; MB."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.greatest = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def _watch(self) -> None:
        while not self._over.wait(0.25):
            self.greatest = max(self.greatest, pss_of(self.pid)[0])

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        self.greatest = max(self.greatest, pss_of(self.pid)[0])


@attrs.frozen
class ManyClients:
    """Clients that come at once, each with a request: for a stream, or for a short whole answer."""

    settings: Settings
    clients: int
    streams: bool
    prompt_tokens: int = 16

    @property
    def max_tokens(self) -> int:
        """The length of an answer."""
        return 16 if self.streams else 4

    @property
    def metrics(self) -> Sequence[Metric]:
        """Streams have tokens and a time to the first, whole answers have requests."""
        rate = "tokens/s" if self.streams else "requests/s"
        times = "ttft" if self.streams else "latency"
        return (
            Metric(rate, "", more_is_better=True),
            Metric(f"{times} p50", "ms"),
            Metric(f"{times} p99", "ms"),
            Metric("memory/connection", "KB"),
            Metric("memory/request", "KB"),
            Metric("share of the few", "", more_is_better=True, digits=2),
            Metric("loop cpu", "s", digits=2),
            Metric("requests/s of a loop's core", "", more_is_better=True, digits=0),
        )

    @property
    def name(self) -> str:
        """Such as "256 clients, streams"."""
        kind = "streams" if self.streams else "short answers"
        return f"{plural(self.clients, 'client')}, {kind}"

    def measure(self, target: Target, seed: str) -> Sample:
        """Start a server, and run once."""
        with self.settings.start(target) as server:
            assert server.pid is not None
            settings = self.settings.having(api_key=MANY).fit(server)
            # Memory of the slots is in use before the many come.
            first = Streams(settings.having(max_tokens=self.max_tokens), settings.slots, 2)
            for scenario in (first_requests(settings), first):
                warm_up([server], scenario)
            before = pss_of(server.pid)[0]
            idle = self._idle_memory(settings, server)
            loop = loop_cpu(server.pid)
            with PeakMemory(server.pid) as peak:
                result = settings.run(server, self._plans(settings, seed))
            loop = loop_cpu(server.pid) - loop
        sample = self._sample(result)
        sample.numbers["memory/connection"] = (idle - before) * 1e3 / self.clients
        sample.numbers["memory/request"] = (peak.greatest - before) * 1e3 / self.clients
        if target.name == OURS and loop:  # llama-server's first thread computes
            sample.numbers["loop cpu"] = loop
            sample.numbers["requests/s of a loop's core"] = sample.requests / loop
        return sample

    def _idle_memory(self, settings: Settings, server: Target) -> float:
        """Return the PSS with all connections, two seconds after they were opened."""
        found: list[float] = []

        def look() -> None:
            time.sleep(2.0)
            found.append(pss_of(server.pid or 0)[0])

        settings.run(server, [Plan(hold=True)] * self.clients, look)
        return found[0]

    def _is_few(self, client: int) -> bool:
        return client % 8 == 7

    def _plans(self, settings: Settings, seed: str) -> list[Plan]:
        shape = attrs.evolve(settings.shape, max_tokens=self.max_tokens)
        if not self.streams:
            shape = attrs.evolve(shape, more={"stream": False, "stream_options": None})

        def plan(client: int) -> Plan:
            own: Shape = attrs.evolve(shape, api_key=FEW if self._is_few(client) else MANY)
            prompt = settings.prompt(self.prompt_tokens, f"{seed} {client}")
            return Plan(requests=[own.request(prompt)])

        return [plan(client) for client in range(self.clients)]

    def _sample(self, result: Run) -> Sample:
        n = self.clients
        if self.streams:
            sample = sample_of(result, planned=n, expected_tokens=self.max_tokens)
        else:
            sample = answered(result, n, lambda wall: {"requests/s": n / wall})
        if (share := self._share(result.outcomes)) is not None:
            sample.numbers["share of the few"] = share
        return sample

    def _share(self, outcomes: Sequence[Outcome]) -> float | None:
        """Return the few's share of the answers that came until the last of the few's."""
        good = [one for one in outcomes if not one.error and one.status == 200]
        own = [one.ended for one in good if self._is_few(one.client)]
        if not own:
            return None
        return len(own) / sum(one.ended <= max(own) for one in good)
