"""From streams to the few numbers that are compared."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import attrs

from benchmarks.driver import Run
from benchmarks.wire import Stream, understand_all
from trioserve.bench.stats import Spread, percentile, ratio_of

#: The numbers of one run by name. A number that could not be measured is missing.
Numbers = dict[str, float]


@attrs.frozen
class Metric:
    """A number that is compared: its name, its unit, and whether more is better."""

    name: str
    unit: str
    more_is_better: bool = False
    digits: int = 1


#: The numbers of a run of plain streams.
STREAM_METRICS = (
    Metric("tokens/s", "", more_is_better=True),
    Metric("requests/s", "", more_is_better=True, digits=2),
    Metric("ttft p50", "ms"),
    Metric("ttft p99", "ms"),
    Metric("itl p50", "ms", digits=2),
    Metric("itl p99", "ms", digits=2),
    Metric("latency p99", "ms"),
)


@attrs.frozen(kw_only=True)
class Sample:
    """One run against one server: its numbers, and what is needed to trust them."""

    numbers: Numbers
    requests: int = 0  # those that were planned
    failed: int = 0  # those that failed, or were never sent
    errors: tuple[str, ...] = ()  # one of each kind
    notes: tuple[str, ...] = ()


def stream_numbers(streams: Sequence[Stream]) -> Numbers:
    """Return the numbers of streams that went well. Times in ms, rates over the whole span."""
    if not streams:
        return {}
    started = min(stream.sent for stream in streams)
    span = max(stream.sent + stream.total for stream in streams) - started
    tokens = sum(stream.tokens for stream in streams)
    gaps = [gap * 1e3 for stream in streams for gap in stream.gaps]
    first = [stream.ttft * 1e3 for stream in streams]
    events = sum(len(stream.at) for stream in streams)
    numbers = {
        "tokens/s": tokens / span,
        "requests/s": len(streams) / span,
        "ttft p50": percentile(first, 0.5),
        "ttft p99": percentile(first, 0.99),
        "itl p50": percentile(gaps, 0.5),
        "itl p99": percentile(gaps, 0.99),
        "latency p50": percentile((s.total * 1e3 for s in streams), 0.5),
        "latency p99": percentile((s.total * 1e3 for s in streams), 0.99),
        "wall s": span,
        "tokens": float(tokens),
        "tokens/event": tokens / events,
        "prompt tokens": statistics.fmean(stream.prompt_tokens for stream in streams),
    }
    if all(stream.prefilled >= 0 for stream in streams):
        numbers["prefilled tokens"] = float(sum(stream.prefilled for stream in streams))
    return {name: value for name, value in numbers.items() if not math.isnan(value)}


def sample_of(run: Run, *, planned: int, expected_tokens: int = 0) -> Sample:
    """Turn a run of streams into a sample. Short and uncounted outputs are noted."""
    streams = understand_all(run.outcomes)
    good = [stream for stream in streams if not stream.error]
    numbers = stream_numbers(good)
    if run.events:
        numbers["generator us/event"] = run.cpu / run.events * 1e6
    notes = []
    short = sum(stream.tokens < expected_tokens for stream in good)
    if short:
        notes.append(f"{short} outputs are shorter than {expected_tokens} tokens")
    if any(not stream.counted for stream in good):
        notes.append("the server reports no token counts: events were counted")
    return Sample(
        numbers=numbers,
        requests=planned,
        failed=planned - len(good),
        errors=error_kinds(streams),
        notes=tuple(notes),
    )


def error_kinds(streams: Iterable[Stream]) -> tuple[str, ...]:
    """Return each error once, with the number of times it came, at most ten kinds."""
    counts = Counter(stream.error for stream in streams if stream.error)
    return tuple(f"{count} x {error}" for error, count in counts.most_common(10))


def column(samples: Sequence[Sample], name: str) -> list[float]:
    """Return one number of each sample that has it."""
    return [sample.numbers[name] for sample in samples if name in sample.numbers]


def ratio(samples: Sequence[Sample], base: Sequence[Sample], name: str) -> Spread | None:
    """Return the ratio of the medians, with the bounds of the ratios of each round."""
    pairs = [
        (ours.numbers[name], theirs.numbers[name])
        for ours, theirs in zip(samples, base, strict=False)
        if name in ours.numbers and name in theirs.numbers
    ]
    return ratio_of([ours for ours, _ in pairs], [theirs for _, theirs in pairs])


def joined(sample: Sample, *others: Sample, **numbers: float) -> Sample:
    """Add other runs' requests and failures to a sample, and more numbers."""
    runs = (sample, *others)
    return Sample(
        numbers=sample.numbers | numbers,
        requests=sum(run.requests for run in runs),
        failed=sum(run.failed for run in runs),
        errors=tuple(error for run in runs for error in run.errors),
        notes=tuple(note for run in runs for note in run.notes),
    )


def quotient(name: str, above: Sample, below: Sample, metric: str = "tokens/s") -> Numbers:
    """Return a number of one sample over that of another under a name, if both have it."""
    if metric in above.numbers and below.numbers.get(metric):
        return {name: above.numbers[metric] / below.numbers[metric]}
    return {}


def failures(samples: Mapping[str, Sequence[Sample]]) -> int:
    """Return the number of requests that failed, all servers together."""
    return sum(sample.failed for runs in samples.values() for sample in runs)
