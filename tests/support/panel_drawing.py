"""Draws the panels of the dashboard without Grafana, from what Prometheus has."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape

import attrs

from examples.deploy.grafana.panels import Panel
from trioserve.bench.plot import ticks

#: A curve: its name, and its points, each a time in seconds and a value.
Curve = tuple[str, Sequence[tuple[float, float]]]

_WIDTH, _HEIGHT, _GAP, _COLUMNS = 318, 176, 8, 3
_LEFT, _TOP, _BELOW = 54, 30, 40  # within a panel: numbers, title, legend
_COLOURS = ("#1b6ca8", "#c2571a", "#1a7f37", "#8250df", "#bf3989", "#6e7781", "#9a6700", "#0aa2c0")
_STYLE = (
    "text{font-family:system-ui,sans-serif;font-size:10px;fill:#59636e}"
    ".title{font-size:12px;font-weight:600;fill:#1f2328}.big{font-size:26px;font-weight:600;"
    "fill:#1a7f37}.head{font-size:15px;font-weight:600;fill:#1f2328}"
)


@attrs.frozen
class Drawn:
    """A panel with its data."""

    panel: Panel
    curves: Sequence[Curve]


def svg(title: str, rows: Mapping[str, Sequence[Drawn]], caption: str) -> str:
    """Draw rows of panels."""
    parts: list[str] = []
    y = 44.0
    for name, panels in rows.items():
        parts.append(_text(_GAP, y + 14, name, "head"))
        y += 24
        stats = panels[0].panel.kind == "stat"
        columns, height = (6, 84) if stats else (_COLUMNS, _HEIGHT)
        width = (_COLUMNS * (_WIDTH + _GAP) - _GAP * columns) / columns
        for i, drawn in enumerate(panels):
            at = (_GAP + i % columns * (width + _GAP), y + i // columns * (height + _GAP))
            parts += _DRAWERS[drawn.panel.kind](drawn, *at, width, height)
        y += -(-len(panels) // columns) * (height + _GAP) + 8
    size = f'width="{_COLUMNS * (_WIDTH + _GAP) + _GAP}" height="{y + 22:.0f}"'
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" {size}><style>{_STYLE}</style>'
        '<rect width="100%" height="100%" fill="#f6f8fa"/>'
    )
    parts.append(_text(_GAP, y + 10, caption))
    return "\n".join([head, _text(_GAP, 26, title, "head"), *parts, "</svg>", ""])


def _stat(drawn: Drawn, x: float, y: float, width: float, height: float) -> Iterator[str]:
    yield _paper(x, y, width, height)
    yield _text(x + 8, y + 18, drawn.panel.title, "title")
    points = [value for _, curve in drawn.curves for _, value in curve if not math.isnan(value)]
    value = _with_unit(points[-1], drawn.panel.unit) if points else "no data"
    yield _text(x + 8, y + 58, value, "big")


def _curves(drawn: Drawn, x: float, y: float, width: float, height: float) -> Iterator[str]:
    yield _paper(x, y, width, height)
    yield _text(x + 8, y + 18, drawn.panel.title, "title")
    layers = _stacked(drawn.curves) if drawn.panel.stacked else drawn.curves
    times = [time for _, points in layers for time, _ in points]
    values = [value for _, points in layers for _, value in points if not math.isnan(value)]
    marks = ticks(max(values, default=1.0))
    left, right, top, low = x + _LEFT, x + width - 8, y + _TOP, y + height - _BELOW
    begin, length = min(times, default=0.0), max(times, default=1.0) - min(times, default=0.0)

    def place(point: tuple[float, float]) -> str:
        across = left + (right - left) * (point[0] - begin) / (length or 1.0)
        return f"{across:.1f},{low - (low - top) * point[1] / marks[-1]:.1f}"

    for mark in (marks[0], marks[len(marks) // 2], marks[-1]):
        _, height_of_mark = place((begin, mark)).split(",")
        yield f'<path d="M{left:.0f} {height_of_mark}H{right:.0f}" stroke="#d1d9e0"/>'
        yield _text(
            left - 4, float(height_of_mark) + 3, _with_unit(mark, drawn.panel.unit), end=True
        )
    for i, (_, points) in reversed(list(enumerate(layers))):
        line = [place(one) for one in points if not math.isnan(one[1])]
        if drawn.panel.stacked and line:
            line = [place((points[0][0], 0)), *line, place((points[-1][0], 0))]
        fill = _COLOURS[i % 8] if drawn.panel.stacked else "none"
        yield (
            f'<polyline points="{" ".join(line)}" fill="{fill}" fill-opacity="1" '
            f'stroke="{_COLOURS[i % 8]}" stroke-width="1.5"/>'
        )
    across, down = x + 8, y + height - 20
    for i, (name, _) in enumerate(layers):
        needed = 16 + 5.6 * len(name)
        if across + needed > x + width and across > x + 8:
            across, down = x + 8, down + 13
        if down > y + height:
            break
        at = f'x="{across:.0f}" y="{down - 7:.0f}" width="8" height="8"'
        yield f'<rect {at} fill="{_COLOURS[i % 8]}"/>'
        yield _text(across + 11, down, name)
        across += needed


def _heat(drawn: Drawn, x: float, y: float, width: float, height: float) -> Iterator[str]:
    """A column for each time, and in it a cell for each bucket."""
    yield _paper(x, y, width, height)
    yield _text(x + 8, y + 18, drawn.panel.title, "title")
    bounds = sorted((float(name), dict(points)) for name, points in drawn.curves)
    times = sorted({time for _, points in bounds for time in points})
    wide = (width - _LEFT - 8) / max(len(times), 1)
    high = (height - _TOP - 12) / max(len(bounds), 1)
    below = dict.fromkeys(times, 0.0)
    for i, (bound, points) in enumerate(bounds):
        top = y + height - 12 - (i + 1) * high
        yield _text(x + _LEFT - 4, top + high / 2 + 3, _with_unit(bound, "s"), end=True)
        for column, time in enumerate(times):
            n = points.get(time, below[time]) - below[time]
            below[time] += n
            if n > 0.1:
                at = f'x="{x + _LEFT + column * wide:.1f}" y="{top:.1f}"'
                size = f'width="{wide:.1f}" height="{high - 1:.1f}"'
                shade = min(1.0, 0.15 + n / 25)
                yield f'<rect {at} {size} fill="#c2571a" fill-opacity="{shade:.2f}"/>'


_DRAWERS = {"stat": _stat, "timeseries": _curves, "heatmap": _heat}


def _stacked(curves: Sequence[Curve]) -> list[Curve]:
    below: dict[float, float] = {}
    layers: list[Curve] = []
    for name, points in curves:
        for time, value in points:
            below[time] = below.get(time, 0.0) + (0.0 if math.isnan(value) else value)
        layers.append((name, [(time, below[time]) for time, _ in points]))
    return layers


def _with_unit(value: float, unit: str) -> str:
    suffix = unit.removeprefix("suffix:") if unit.startswith("suffix:") else ""
    if unit == "s":
        return f"{value * 1000:.3g} ms" if value < 1 else f"{value:.3g} s"
    if unit == "bytes":
        return f"{value / 2**20:,.0f} MiB" if value >= 2**20 else f"{value:,.3g} B"
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    return (f"{value:,.0f}" if value >= 100 else f"{value:.3g}") + suffix.replace(" tokens", " tok")


def _paper(x: float, y: float, width: float, height: float) -> str:
    size = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height}"'
    return f'<rect {size} rx="4" fill="#fff" stroke="#d1d9e0"/>'


def _text(x: float, y: float, text: str, kind: str = "", *, end: bool = False) -> str:
    anchor = ' text-anchor="end"' if end else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}"{anchor}>{escape(text)}</text>'
