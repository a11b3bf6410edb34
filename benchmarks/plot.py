"""The verdicts as one picture, written as SVG without any library."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

import attrs

from benchmarks.stats import Spread

#: The least and the greatest share of a target that has a place of its own.
LOW, HIGH = 0.02, 50.0
_LEFT, _WIDTH, _STEP, _TOP = 570, 480, 24, 58


@attrs.frozen(kw_only=True)
class Bar:
    """One line of the picture. Shares are of what the target allows: 1 and below is good."""

    label: str
    ours: Spread | None
    base: Spread | None


def share(value: Spread | None, bound: float, *, least: bool) -> Spread | None:
    """Return a value as a share of its target; below 1 it is better, whatever its direction."""
    if value is None:
        return None

    def one(number: float) -> float:
        over, under = (bound, number) if least else (number, bound)
        if under > 0:
            return max(over, 0.0) / under
        return 0.0 if over <= under else math.inf

    ends = sorted((one(value.low), one(value.high)))
    return Spread(one(value.median), ends[0], ends[1])


def place(number: float) -> float:
    """Return where a share lies on the axis, in pixels; what is beyond lies on the border."""
    clamped = min(max(number, LOW), HIGH)
    return _LEFT + _WIDTH * math.log(clamped / LOW) / math.log(HIGH / LOW)


def svg(title: str, bars: Sequence[Bar]) -> str:
    """Draw the bars: a dot with its spread for each server, and a line at the target."""
    height = _TOP + _STEP * len(bars) + 34
    bottom = height - 28
    text = 'font-family="sans-serif" font-size="12"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_LEFT + _WIDTH + 30}" '
        f'height="{height}" {text}>',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="20" font-size="15">{escape(title)}</text>',
        '<text x="10" y="40" fill="#555">share of what the target allows: left of the line it '
        "is met; filled: trioserve, hollow: llama-server</text>",
        f'<rect x="{_LEFT}" y="{_TOP - 8}" width="{place(1) - _LEFT:.1f}" '
        f'height="{bottom - _TOP + 8}" fill="#e9f6ec"/>',
    ]
    for tick in (0.02, 0.1, 0.5, 1.0, 2.0, 10.0, 50.0):
        x = place(tick)
        colour, width = ("#333", 1.5) if tick == 1 else ("#ccc", 0.5)
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 8}" x2="{x:.1f}" y2="{bottom}" stroke="{colour}" '
            f'stroke-width="{width}"/>'
        )
        parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{tick:g}</text>')
    for number, bar in enumerate(bars):
        y = _TOP + _STEP * number + _STEP // 2
        parts.append(f'<text x="10" y="{y + 4}">{escape(bar.label)}</text>')
        parts += _dot(bar.base, y - 4, "#c2571a", filled=False)
        parts += _dot(bar.ours, y + 3, "#1b6ca8", filled=True)
    return "\n".join([*parts, "</svg>", ""])


def _dot(value: Spread | None, y: float, colour: str, *, filled: bool) -> list[str]:
    if value is None:
        return []
    fill = colour if filled else "white"
    return [
        f'<line x1="{place(value.low):.1f}" y1="{y}" x2="{place(value.high):.1f}" y2="{y}" '
        f'stroke="{colour}" stroke-width="2"/>',
        f'<circle cx="{place(value.median):.1f}" cy="{y}" r="4" fill="{fill}" '
        f'stroke="{colour}" stroke-width="1.5"/>',
    ]
