"""The curve of a run: a CSV with a line for each second, and a picture of it.

python -m tests.soak.curve soak.csv soak.svg
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path

import attrs

from tests.soak.process import Sample
from trioserve.bench import plot
from trioserve.bench.stats import Spread, spread

#: Points of a line: each has the median of a part of the run, and its band the extremes.
_POINTS = 12


def write_csv(path: Path, samples: Sequence[Sample]) -> None:
    """Write the samples."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(field.name for field in attrs.fields(Sample))
        writer.writerows(attrs.astuple(sample) for sample in samples)


def read_csv(path: Path) -> list[Sample]:
    """Read them again."""
    with path.open(newline="") as file:
        return [
            Sample(seconds=float(line.pop("seconds")), **{name: int(n) for name, n in line.items()})
            for line in csv.DictReader(file)
        ]


def svg(samples: Sequence[Sample]) -> str:
    """Draw memory, descriptors, threads, requests and tokens over time."""
    length = samples[-1].seconds or 1.0
    by_part = groupby(samples, lambda one: min(int(one.seconds / length * _POINTS), _POINTS - 1))
    parts = [list(part) for _, part in by_part]

    def rate(part: list[Sample], done: Callable[[Sample], int]) -> list[float]:
        seconds = part[-1].seconds - part[0].seconds
        return [max(done(part[-1]) - done(part[0]), 0) / seconds] if seconds else [0.0]

    charts = [
        _chart("resident memory, MiB", parts, lambda part: [s.rss_kib / 1024 for s in part]),
        _chart("open descriptors", parts, lambda part: [float(s.descriptors) for s in part]),
        _chart("threads", parts, lambda part: [float(s.threads) for s in part]),
        _chart("requests a second", parts, lambda part: rate(part, lambda s: s.requests)),
        _chart("tokens a second", parts, lambda part: rate(part, lambda s: s.tokens)),
    ]
    return plot.curves("A mixed load", ["trioserve"], charts, f"{length:g} seconds")


def _chart(
    title: str, parts: Sequence[list[Sample]], values: Callable[[list[Sample]], list[float]]
) -> plot.Chart:
    line: list[tuple[float, Spread]] = []
    for part in parts:
        found = spread(values(part))
        assert found is not None
        line.append((round(part[0].seconds), found))
    return plot.Chart(
        title=title, x_title="seconds", more_is_better="second" in title, lines={"trioserve": line}
    )


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(svg(read_csv(Path(sys.argv[1]))))
