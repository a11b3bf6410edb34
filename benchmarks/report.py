"""Measuring servers in turn, the tables and files of that, and options of these programs."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import attrs

from benchmarks.driver import MAX_CLIENTS
from benchmarks.servers import Target, TargetError, exit_on_sigterm
from benchmarks.stats import Metric, Sample, column, failures, ratio
from trioserve.bench.report import machine
from trioserve.bench.stats import Spread, spread

Note = Callable[[str], None]


class Scenario(Protocol):
    """A situation that servers are put through, and the numbers that its table shows."""

    @property
    def name(self) -> str:
        """The title of its table."""

    @property
    def metrics(self) -> Sequence[Metric]:
        """The lines of its table."""

    def measure(self, target: Target, seed: str) -> Sample:
        """Run it once. The same seed gives every target the same prompts."""


def in_turn(
    targets: Sequence[Target],
    scenario: Scenario,
    rounds: int,
    note: Note,
    *,
    until: float = math.inf,
) -> dict[str, list[Sample]]:
    """Measure A B, B A, and so on; return the samples by server.

    A round has the same seed for every server. An error ends it, and is part of the sample. After
    the first, no round begins that would end after `until`, of `time.monotonic`.
    """
    samples: dict[str, list[Sample]] = {target.name: [] for target in targets}
    longest = 0.0
    for number in range(rounds):
        started = time.monotonic()
        if number and started + longest > until:
            break
        for target in targets if number % 2 == 0 else reversed(targets):
            note(f"  {scenario.name}, round {number + 1}: {target.name}")
            try:
                sample = scenario.measure(target, f"{scenario.name} round {number}")
            except (TargetError, OSError, ValueError, KeyError) as error:
                sample = Sample(numbers={}, requests=1, failed=1, errors=(repr(error),))
            samples[target.name].append(sample)
        longest = max(longest, time.monotonic() - started)
    return samples


def measure_all(
    options: argparse.Namespace, targets: Sequence[Target], scenarios: Sequence[Scenario]
) -> dict[str, object]:
    """Measure scenarios, print a table of each, and return the samples.

    Raises:
        TargetError: requests failed.
    """
    results: dict[str, object] = {}
    for scenario in scenarios:
        samples = in_turn(targets, scenario, options.rounds, progress(options.quiet))
        results[scenario.name] = samples
        print(table(scenario.name, scenario.metrics, samples), flush=True)
        if failures(samples):
            raise TargetError(f"{scenario.name}: requests failed")
    return results


def warm_up(targets: Sequence[Target], scenario: Scenario) -> None:
    """Measure each server once, for nothing.

    Raises:
        TargetError: a request failed, so measuring makes no sense.
    """
    for target in targets:
        sample = scenario.measure(target, "warm-up")
        if sample.failed:
            raise TargetError(f"{target.name}: warm-up failed: {'; '.join(sample.errors)}")


# -- tables and files


def table(title: str, metrics: Sequence[Metric], samples: Mapping[str, Sequence[Sample]]) -> str:
    """Return one table: a line for each metric, a column for each server, then the ratios.

    The last server is the base of the ratios. Brackets hold the least and the greatest round.
    """
    names = list(samples)
    base = names[-1]
    rows = [[title, *names, *(f"{name} / {base}" for name in names[:-1])]]
    for metric in metrics:
        values = [spread(column(samples[name], metric.name)) for name in names]
        ratios = [ratio(samples[name], samples[base], metric.name) for name in names[:-1]]
        cells = [_cell(value, metric.digits) for value in values]
        cells += [_cell(value, 3) for value in ratios]
        rows.append([f"{metric.name} ({metric.unit})" if metric.unit else metric.name, *cells])
    rows.append(["failed requests", *(_failed(samples[name]) for name in names)])
    return align(rows) + _remarks(samples)


def _cell(value: Spread | None, digits: int) -> str:
    if value is None:
        return "-"
    return f"{value.median:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def _failed(samples: Sequence[Sample]) -> str:
    return f"{sum(s.failed for s in samples)} of {sum(s.requests for s in samples)}"


def _remarks(samples: Mapping[str, Sequence[Sample]]) -> str:
    lines = []
    for name, runs in samples.items():
        remarks = dict.fromkeys(remark for run in runs for remark in (*run.errors, *run.notes))
        lines += [f"  {name}: {remark}\n" for remark in remarks]
    return "".join(lines)


def align(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the head first, as a table in plain text."""
    width = max(len(row) for row in rows)
    full = [[*row, *[""] * (width - len(row))] for row in rows]
    widths = [max(len(row[place]) for row in full) for place in range(width)]
    lines = []
    for row in full:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(size) for cell, size in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "-" * max(len(line) for line in lines))
    return "\n".join(lines) + "\n"


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Return rows, the head first, as a table in Markdown."""
    lines = ["| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(rows[0]))
    return "\n".join(lines) + "\n"


def write_json(path: Path, options: argparse.Namespace, content: Mapping[str, Any]) -> None:
    """Write results, with the options and the machine they come from.

    Raises:
        OSError: the file can't be written.
    """
    whole = {"machine": machine(), "options": vars(options), **content}
    path.write_text(json.dumps(whole, indent=1, default=_plain) + "\n", encoding="utf-8")


def _plain(value: object) -> object:
    return attrs.asdict(value, recurse=False) if isinstance(value, Sample) else str(value)


# -- the command line


def arguments(module: str, doc: str | None) -> argparse.ArgumentParser:
    """Make the parser of a program, described by the first line of its documentation."""
    return argparse.ArgumentParser(
        prog=f"python -m benchmarks.{module}", description=(doc or "").partition("\n")[0]
    )


def finish(options: argparse.Namespace, measure: Callable[[], Mapping[str, object]]) -> int:
    """Measure, and write all samples where ``--json`` says. Returns the exit code, 2 on failure."""
    exit_on_sigterm()
    try:
        results = measure()
    except TargetError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.json is not None:
        write_json(options.json, options, {"results": results})
    return 0


def bounded(low: int, high: int) -> Callable[[str], int]:
    """Make a type for argparse: an integer between the two, both included."""

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer") from None
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{value} is not between {low} and {high}")
        return value

    return convert


def counts(text: str) -> list[int]:
    """Read numbers of clients such as ``1,5,10``."""
    return [bounded(1, MAX_CLIENTS)(part) for part in text.split(",")]


def seconds(text: str) -> float:
    """Read a time limit: more than 0 and at most four hours."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
    if not 0 < value <= 14_400:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 14400")
    return value


def progress(quiet: bool) -> Note:
    """Make the function that reports progress."""
    return (lambda line: None) if quiet else lambda line: print(line, file=sys.stderr, flush=True)
