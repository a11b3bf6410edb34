"""The curve of a run: a CSV with a line for each second, and a picture of it.

python -m tests.soak.curve soak.csv soak.svg
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path

import attrs

from tests.soak.process import Sample

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 640, 90, 60, 34, 34

#: Points of a line at most; a run of an hour has 3,600 samples.
_POINTS = 300


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
    """Draw memory, descriptors and threads, requests and tokens over time."""
    thin = list(samples[:: len(samples) // _POINTS + 1])
    rates, length = _rates(thin), samples[-1].seconds or 1.0
    blue, red = "#1b6ca8", "#c2571a"
    panels = [
        _panel(0, length, thin, "resident memory, MiB", [(blue, lambda s: s.rss_kib / 1024)]),
        _panel(
            1,
            length,
            thin,
            "open descriptors (blue) and threads (red)",
            [(blue, lambda s: s.descriptors), (red, lambda s: s.threads)],
        ),
        _panel(2, length, rates, "requests a second", [(blue, lambda s: s.requests)]),
        _panel(3, length, rates, "tokens a second", [(blue, lambda s: s.tokens)]),
    ]
    height = _TOP + len(panels) * (_HEIGHT + _GAP)
    unit, size = ("minutes", 60) if length >= 180 else ("seconds", 1)
    ticks = [
        f'<text x="{_LEFT + _WIDTH * part:.0f}" y="{height - 14}" text-anchor="middle">'
        f"{length * part / size:.3g}</text>"
        for part in (0, 0.25, 0.5, 0.75, 1)
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 30}" '
            f'height="{height + 6}" font-family="sans-serif" font-size="12">',
            '<rect width="100%" height="100%" fill="white"/>',
            *panels,
            *ticks,
            f'<text x="{_LEFT + _WIDTH}" y="{height + 2}" text-anchor="end">{unit}</text>',
            "</svg>",
            "",
        ]
    )


@attrs.frozen
class _Rate:
    seconds: float
    requests: float
    tokens: float


def _rates(samples: Sequence[Sample]) -> list[_Rate]:
    return [
        _Rate(
            after.seconds,
            (after.requests - before.requests) / (after.seconds - before.seconds),
            max(after.tokens - before.tokens, 0) / (after.seconds - before.seconds),
        )
        for before, after in pairwise(samples)
        if after.seconds > before.seconds
    ]


def _panel(
    number: int,
    length: float,
    points: Sequence[Sample | _Rate],
    title: str,
    lines: Sequence[tuple[str, Callable[..., float]]],
) -> str:
    """Draw one panel: its title, its largest value, and its lines, from 0 up."""
    top = _TOP + number * (_HEIGHT + _GAP)
    bottom = top + _HEIGHT
    most = max((value(point) for point in points for _, value in lines), default=0) or 1.0
    parts = [
        f'<text x="{_LEFT}" y="{top - 8}">{escape(title)}</text>',
        f'<text x="{_LEFT - 6}" y="{top + 8}" text-anchor="end">{most:.3g}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom}" text-anchor="end">0</text>',
        f'<rect x="{_LEFT}" y="{top}" width="{_WIDTH}" height="{_HEIGHT}" fill="none" '
        'stroke="#ccc"/>',
    ]
    for colour, value in lines:
        drawn = " ".join(
            f"{_LEFT + _WIDTH * point.seconds / length:.1f},"
            f"{bottom - _HEIGHT * value(point) / most:.1f}"
            for point in points
        )
        parts.append(f'<polyline points="{drawn}" fill="none" stroke="{colour}"/>')
    return "\n".join(parts)


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(svg(read_csv(Path(sys.argv[1]))))
