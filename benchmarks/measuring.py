"""What commands that start servers and measure them have in common: a table for each scenario."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import attrs

from benchmarks import report
from benchmarks.driver import run
from benchmarks.load import Load, interleave, progress
from benchmarks.stats import STREAM_METRICS, Metric, Sample, sample_of, worst_failures
from benchmarks.targets import Target, TargetError


class Scenario(Protocol):
    """Something to measure, and how to report it."""

    @property
    def name(self) -> str:
        """The title of its table."""

    @property
    def metrics(self) -> Sequence[Metric]:
        """The columns of its table."""

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""


@attrs.frozen
class StreamsWithCpu:
    """Streams, and the CPU that is used for each of their events.

    `cpu_of` tells how many seconds a process has used so far, and `metric` is what that is called.
    """

    load: Load
    cpu_of: Callable[[int], float]
    metric: str

    @property
    def name(self) -> str:
        """Such as "8 streams"."""
        return f"{self.load.clients} streams"

    @property
    def metrics(self) -> Sequence[Metric]:
        """See `Scenario`."""
        return (*STREAM_METRICS, Metric(self.metric, "µs", digits=0), Metric("tokens/event", ""))

    def measure(self, target: Target, seed: str) -> Sample:
        """Run once."""
        assert target.pid is not None
        load = self.load
        before = self.cpu_of(target.pid)
        result = run(target.address, load.plans(seed), timeout=load.timeout, max_time=load.max_time)
        used = self.cpu_of(target.pid) - before
        sample = sample_of(result, planned=load.clients * load.requests)
        if result.events:
            sample.numbers[self.metric] = used / result.events * 1e6
        return sample


def measure_in_turn(
    options: argparse.Namespace, targets: Sequence[Target], scenarios: Sequence[Scenario]
) -> dict[str, object]:
    """Measure scenarios, print a table of each, and return the samples.

    Raises:
        TargetError: requests failed.
    """
    results: dict[str, object] = {}
    for scenario in scenarios:
        note = progress(options.quiet)
        samples = interleave(targets, options.rounds, scenario.measure, scenario.name, note)
        results[scenario.name] = samples
        print(report.table(scenario.name, scenario.metrics, samples), flush=True)
        if worst_failures(samples):
            raise TargetError(f"{scenario.name}: requests failed")
    return results


def finish(options: argparse.Namespace, measure: Callable[[], Mapping[str, object]]) -> int:
    """Measure, and write all samples where ``--json`` says. Returns the exit code, 2 on failure."""
    try:
        results = measure()
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        report.write_json(options.json, {"options": report.plain(options), "results": results})
    return 0
