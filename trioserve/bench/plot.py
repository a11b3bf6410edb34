"""Pictures as SVG, without any library: bars beside each other, and curves.

They follow the reader's light or dark scheme, and contain no scripts and no fonts.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape

import attrs

from trioserve.bench.stats import Spread

_WIDTH, _MARGIN = 1000, 16
_LEFT, _RIGHT = 350, 260  # of bars: room for labels, and for numbers
_HEAD = 64  # title and legend
_ROW, _BAR = 30, 9
_ABOVE, _BELOW = 36, 34  # of a panel: its title, and the numbers of its axis
_CHART_LEFT, _CHART_WIDTH, _CHART_HEIGHT, _CHART_STEP = 64, 400, 210, 300

#: For light and for dark: two servers, targets, paper, ink, soft ink, grid, two more servers.
_COLOURS = tuple(
    colours.split()
    for colours in (
        "#1b6ca8 #c2571a #1a7f37 #ffffff #1f2328 #59636e #d1d9e0 #8250df #9a6700",
        "#58a6ff #f0883e #56d364 #0d1117 #e6edf3 #9198a1 #30363d #bc8cff #d29922",
    )
)
_CLASSES = (
    ".s0{{fill:{0};stroke:{0}}}.s1{{fill:{1};stroke:{1}}}.target{{stroke:{2}}}.paper{{fill:{3}}}"
    ".s2{{fill:{7};stroke:{7}}}.s3{{fill:{8};stroke:{8}}}"
    "text{{fill:{4}}}.soft{{fill:{5}}}.axis{{stroke:{5}}}.grid{{stroke:{6}}}"
)
_SHAPES = (
    "text{font-family:system-ui,sans-serif;font-size:12px;stroke:none}.title{font-size:16px;font-weight:600}"
    ".name{font-weight:600}.end{text-anchor:end}.middle{text-anchor:middle}"
    ".target{stroke-width:2.5}.spread{stroke-width:1.5;opacity:.55}.curve{fill:none;stroke-width:2}"
    ".band{opacity:.15;stroke:none}tspan.s0,tspan.s1{stroke:none}"
)


@attrs.frozen(kw_only=True)
class Row:
    """A thing that was measured: a bar for each server that has a value."""

    label: str
    values: Mapping[str, Spread]
    target: float | None = None  # in the unit of the axis
    remark: str = ""


@attrs.frozen(kw_only=True)
class Panel:
    """Rows with one axis, which begins at 0."""

    title: str  # what is measured, with its unit
    more_is_better: bool
    rows: Sequence[Row]


@attrs.frozen(kw_only=True)
class Chart:
    """Curves over one axis: a line for each server, and a band from its least to its greatest."""

    title: str  # what is measured, with its unit
    x_title: str
    more_is_better: bool
    lines: Mapping[str, Sequence[tuple[float, Spread]]]


def bars(title: str, servers: Sequence[str], panels: Sequence[Panel], caption: str) -> str:
    """Draw panels, one below the other. The colours are those of the servers, in their order."""
    parts: list[str] = []
    top = _HEAD
    for panel in panels:
        parts += _panel(panel, servers, top)
        top += _ABOVE + _ROW * len(panel.rows) + _BELOW
    return _document(title, servers, parts, top, caption)


def curves(title: str, servers: Sequence[str], charts: Sequence[Chart], caption: str) -> str:
    """Draw charts, two beside each other, with up to four lines each."""
    parts: list[str] = []
    for i, chart in enumerate(charts):
        parts += _chart(chart, servers, i % 2 * _WIDTH // 2, _HEAD + i // 2 * _CHART_STEP)
    return _document(title, servers, parts, _HEAD + -(-len(charts) // 2) * _CHART_STEP, caption)


def ticks(most: float) -> list[float]:
    """Choose at most six round numbers for an axis from 0 to `most` or a little more."""
    if not 0 < most < math.inf:
        most = 1.0
    scale = 10.0 ** math.floor(math.log10(most / 5))
    step = next(by * scale for by in (1, 2, 2.5, 5, 10) if by * scale * 5 >= most * (1 - 1e-9))
    return [step * i for i in range(math.ceil(most / step * (1 - 1e-9)) + 1)]


def number(value: float) -> str:
    """Write a number with about three digits."""
    if abs(value) >= 100 or value == int(value):
        return f"{value:,.0f}"
    return f"{value:.3g}"


# -- bars


def _panel(panel: Panel, servers: Sequence[str], top: int) -> Iterator[str]:
    upper, lower = top + _ABOVE - 6, top + _ABOVE + _ROW * len(panel.rows)
    yield _text(_MARGIN, top + 20, panel.title, "name")
    yield _text(_WIDTH - _MARGIN, top + 20, _better(panel.more_is_better), "soft end")
    highs = (value.high for row in panel.rows for value in row.values.values())
    marks = ticks(max([*(row.target or 0.0 for row in panel.rows), *highs]))

    def place(value: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - _RIGHT) * max(value, 0.0) / marks[-1]

    for mark in marks:
        yield _line(place(mark), upper, place(mark), lower, "grid")
        yield _text(place(mark), lower + 15, number(mark), "soft middle")
    for i, row in enumerate(panel.rows):
        yield from _row(row, servers, place, upper + 6 + _ROW * i + _ROW // 2)
    yield _line(_LEFT, upper, _LEFT, lower, "axis")


def _row(
    row: Row, servers: Sequence[str], place: Callable[[float], float], middle: int
) -> Iterator[str]:
    yield _text(_LEFT - 10, middle + 4, row.label, "end")
    numbers = []
    for i, server in enumerate(servers):
        value = row.values.get(server)
        if value is None:
            continue
        numbers.append(f'<tspan class="s{i}">{number(value.median)}</tspan>')
        y, end = middle - _BAR + i * (_BAR + 1), place(value.median)
        yield (
            f'<rect class="s{i}" x="{_LEFT}" y="{y}" width="{end - _LEFT:.1f}" height="{_BAR}" '
            'stroke-width="0"/>'
        )
        across = y + _BAR / 2
        if value.low < value.high:
            yield _line(place(value.low), across, place(value.high), across, "axis spread")
    if row.target is not None:
        yield _line(place(row.target), middle - 12, place(row.target), middle + 13, "target")
    shown = " / ".join(numbers)
    yield f'<text x="{_WIDTH - _RIGHT + 14}" y="{middle + 4}">{shown}</text>'
    yield _text(_WIDTH - _MARGIN, middle + 4, row.remark, "soft end")


# -- curves


def _chart(chart: Chart, servers: Sequence[str], left: int, top: int) -> Iterator[str]:
    x0, lower = left + _CHART_LEFT, top + 34 + _CHART_HEIGHT
    points = [point for line in chart.lines.values() for point in line]
    xs = sorted({x for x, _ in points})
    marks = ticks(max(value.high for _, value in points))

    def across(x: float) -> float:  # each doubling is as wide; an axis from 0 is even
        begin, end, at = (one if xs[0] <= 0 else math.log(one) for one in (xs[0], xs[-1], x))
        return x0 + _CHART_WIDTH * (at - begin) / ((end - begin) or 1.0)

    def up(value: float) -> float:
        return lower - _CHART_HEIGHT * max(value, 0.0) / marks[-1]

    yield _text(left + _MARGIN, top + 18, chart.title, "name")
    yield _text(x0 + _CHART_WIDTH, top + 18, _better(chart.more_is_better), "soft end")
    for mark in marks:
        yield _line(x0, up(mark), x0 + _CHART_WIDTH, up(mark), "grid")
        yield _text(x0 - 8, up(mark) + 4, number(mark), "soft end")
    for x in xs:
        yield _line(across(x), lower, across(x), lower + 5, "axis")
        yield _text(across(x), lower + 19, number(x), "soft middle")
    yield _text(x0 + _CHART_WIDTH / 2, lower + 37, chart.x_title, "soft middle")
    for i, server in enumerate(servers):
        line = chart.lines.get(server, ())
        above = [f"{across(x):.1f},{up(value.high):.1f}" for x, value in line]
        below = [f"{across(x):.1f},{up(value.low):.1f}" for x, value in reversed(line)]
        yield f'<polygon class="s{i} band" points="{" ".join(above + below)}"/>'
        along = [(across(x), up(value.median)) for x, value in line]
        drawn = " ".join(f"{x:.1f},{y:.1f}" for x, y in along)
        yield f'<g class="s{i}"><polyline class="curve" points="{drawn}"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5"/>' for x, y in along)
        yield "</g>"


# -- what all of them have


def _document(
    title: str, servers: Sequence[str], parts: Sequence[str], bottom: int, caption: str
) -> str:
    lines = textwrap.wrap(caption, 150)
    height = bottom + 16 * len(lines) + _MARGIN
    light, dark = (_CLASSES.format(*colours) for colours in _COLOURS)
    head = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img">',
        f"<title>{escape(title)}</title><desc>{escape(caption)}</desc>",
        f"<style>{light}{_SHAPES}@media(prefers-color-scheme:dark){{{dark}}}</style>",
        f'<rect class="paper" width="{_WIDTH}" height="{height}"/>',
        _text(_MARGIN, 26, title, "title"),
    ]
    x = _MARGIN
    for i, server in enumerate(servers):
        head.append(f'<rect class="s{i}" x="{x}" y="39" width="12" height="10"/>')
        head.append(_text(x + 18, 48, server, ""))
        x += 40 + 7 * len(server)
    if any('class="target"' in part for part in parts):
        head.append(_line(x + 6, 37, x + 6, 51, "target"))
        head.append(_text(x + 18, 48, "target", ""))
    foot = [_text(_MARGIN, bottom + 12 + 16 * i, line, "soft") for i, line in enumerate(lines)]
    return "\n".join([*head, *parts, *foot, "</svg>", ""])


def _better(more: bool) -> str:
    return "more is better" if more else "less is better"


def _text(x: float, y: float, text: str, kind: str) -> str:
    return f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
