"""From streams to the few numbers that are compared."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence

import attrs

from benchmarks.plan import Run
from benchmarks.wire import Stream, understand_all
from trioserve.bench.stats import Spread, percentile, spread

#: The numbers of one run by name. A number that could not be measured is missing.
Numbers = dict[str, float]


@attrs.frozen
class Metric:
    """A number that is compared: its name, its unit, and whether more is better."""

    name: str
    unit: str
    more_is_better: bool = False
    digits: int = 1


#: What a run of plain streams yields.
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
    counts: dict[str, int] = {}
    for stream in streams:
        if stream.error:
            counts[stream.error] = counts.get(stream.error, 0) + 1
    return tuple(f"{count} x {error}" for error, count in list(counts.items())[:10])


def column(samples: Sequence[Sample], name: str) -> list[float]:
    """Return one number of each sample that has it."""
    return [sample.numbers[name] for sample in samples if name in sample.numbers]


def ratio(samples: Sequence[Sample], base: Sequence[Sample], name: str) -> Spread | None:
    """Return the ratio of the medians, with the bounds of the ratios of each round."""
    median, base_median = spread(column(samples, name)), spread(column(base, name))
    if median is None or base_median is None or base_median.median == 0:
        return None
    pairs = [
        sample.numbers[name] / other.numbers[name]
        for sample, other in zip(samples, base, strict=False)
        if sample.numbers.get(name) is not None and other.numbers.get(name)
    ]
    value = median.median / base_median.median
    return Spread(value, min(pairs, default=value), max(pairs, default=value))


def worst_failures(samples: Mapping[str, Sequence[Sample]]) -> int:
    """Return the number of requests that failed, all servers together."""
    return sum(sample.failed for runs in samples.values() for sample in runs)
