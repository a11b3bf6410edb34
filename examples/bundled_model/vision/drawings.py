"""Drawings for the eyes: one to five shapes of a colour, or one digit, written or printed.

A drawing is kept as the coverage of its ink. The colours are chosen when it is
used, so that one drawing serves many times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from examples.bundled_model.vision.fonts import Digits

SIZE = 64
SCALE = 3
#: No triangles: the language model never learned to write the beginning of the word.
SHAPES = ("circle", "square", "diamond", "star", "cross", "heart")
#: Shapes in a drawing.
MOST = 5
#: The height of a printed digit, as shares of the picture's.
PRINTED = (0.22, 0.95)

#: Ink, as ranges of hue, saturation and value.
COLORS = {
    "red": ((-0.025, 0.025), (0.75, 1.0), (0.7, 1.0)),
    "orange": ((0.065, 0.095), (0.85, 1.0), (0.92, 1.0)),
    "yellow": ((0.14, 0.17), (0.75, 1.0), (0.9, 1.0)),
    "green": ((0.28, 0.40), (0.6, 1.0), (0.4, 0.9)),
    "blue": ((0.57, 0.68), (0.65, 1.0), (0.6, 1.0)),
    "purple": ((0.74, 0.81), (0.55, 1.0), (0.45, 0.8)),
    "pink": ((0.87, 0.95), (0.3, 0.6), (0.95, 1.0)),
    "black": ((0.0, 1.0), (0.0, 0.3), (0.0, 0.16)),
    "white": ((0.0, 1.0), (0.0, 0.06), (0.94, 1.0)),
}

#: Strokes of each digit in a unit square, y down; several ways of writing some.
DIGITS: dict[int, tuple[str, ...]] = {
    0: (".5,0 .15,.15 .05,.5 .15,.85 .5,1 .85,.85 .95,.5 .85,.15 .5,0",),
    1: (".5,0 .5,1", ".3,.22 .55,0 .55,1", ".3,.22 .55,0 .55,1|.3,1 .8,1"),
    2: (
        ".1,.25 .25,.05 .6,0 .88,.2 .75,.5 .4,.75 .1,1|.1,1 .92,1",
        ".12,.2 .4,0 .8,.1 .85,.35 .5,.7 .08,1 .3,.93 .95,1",
    ),
    3: (
        ".12,.12 .45,0 .82,.12 .8,.38 .45,.48|.45,.48 .85,.58 .9,.85 .5,1 .1,.88",
        ".12,.02 .85,.02|.85,.02 .45,.4|.45,.4 .85,.5 .92,.8 .5,1 .1,.9",
    ),
    4: (
        ".65,0 .05,.68|.05,.68 .95,.68|.68,.35 .68,1",
        ".15,0 .1,.5|.1,.5 .9,.5|.78,0 .75,1",
        ".7,1 .7,0|.7,0 .08,.65|.08,.65 .98,.65",
    ),
    5: (
        ".88,0 .2,0|.2,0 .15,.45|.15,.45 .5,.36 .88,.52 .88,.85 .5,1 .1,.9",
        ".2,0 .15,.42|.15,.42 .6,.38 .9,.65 .7,.95 .1,.95|.2,0 .9,.02",
    ),
    6: (
        ".75,0 .35,.2 .1,.6 .2,.92 .5,1 .85,.88 .85,.62 .5,.5 .15,.68",
        ".6,0 .2,.4 .08,.75 .35,1 .75,.95 .88,.7 .6,.52 .2,.6 .1,.75",
    ),
    7: (
        ".05,.02 .95,.02|.95,.02 .4,1",
        ".08,.02 .92,.02|.92,.02 .6,.45 .45,1",
        ".05,.02 .95,.02|.95,.02 .4,1|.35,.5 .85,.5",
    ),
    8: (
        ".5,.47 .15,.3 .2,.08 .5,0 .8,.08 .85,.3 .5,.47 .1,.72 .2,.94 .5,1 .8,.94 .9,.72 .5,.47",
        ".85,.12 .5,0 .15,.15 .3,.42 .75,.6 .88,.85 .5,1 .12,.85 .25,.6 .7,.4 .85,.12",
    ),
    9: (
        ".85,.3 .6,.5 .2,.45 .12,.2 .4,0 .8,.08 .87,.35 .8,.7 .65,1",
        ".85,.25 .5,.5 .15,.35 .2,.08 .6,0 .85,.2|.85,.1 .82,1",
    ),
}

Array = npt.NDArray[np.uint8]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Drawing:
    """The coverage of the ink, what it shows, and the bars beside a picture that is no square."""

    ink: Array
    shape: str | None
    number: int
    bars: tuple[int, int] = (0, 0)

    @property
    def is_digit(self) -> bool:
        """True if it is one digit; else ``number`` counts shapes."""
        return self.shape is None


def smooth(points: Points, steps: int = 6) -> Points:
    """Draw a Catmull-Rom curve through the points."""
    if len(points) < 3:
        return points
    padded = [points[0], *points, points[-1]]
    curve: Points = []
    for a, b, c, d in zip(padded, padded[1:], padded[2:], padded[3:], strict=False):
        for step in range(steps):
            t = step / steps
            curve.append(
                (
                    _catmull_rom(a[0], b[0], c[0], d[0], t),
                    _catmull_rom(a[1], b[1], c[1], d[1], t),
                )
            )
    return [*curve, points[-1]]


def _catmull_rom(a: float, b: float, c: float, d: float, t: float) -> float:
    return 0.5 * (
        2 * b + (c - a) * t + (2 * a - 5 * b + 4 * c - d) * t * t + (3 * b - a - 3 * c + d) * t**3
    )


def outline(shape: str, rng: Random) -> Points:
    """Return the border of a shape in the square from -1 to 1, upright."""
    match shape:
        case "circle":
            wide, high = 1.0, rng.uniform(0.88, 1.0)
            return [
                (wide * math.cos(i * math.tau / 36), high * math.sin(i * math.tau / 36))
                for i in range(36)
            ]
        case "square":
            side = 0.86
            return [(-side, -side), (side, -side), (side, side), (-side, side)]
        case "diamond":
            narrow = rng.uniform(0.55, 0.8)
            return [(0.0, -1.0), (narrow, 0.0), (0.0, 1.0), (-narrow, 0.0)]
        case "star":
            inner = rng.uniform(0.36, 0.48)
            return [
                ((1 if i % 2 == 0 else inner) * math.sin(i * math.pi / 5),
                 -(1 if i % 2 == 0 else inner) * math.cos(i * math.pi / 5))
                for i in range(10)
            ]  # fmt: skip
        case "cross":
            w = rng.uniform(0.2, 0.36)
            return [(-w, -1), (w, -1), (w, -w), (1, -w), (1, w), (w, w), (w, 1), (-w, 1),
                    (-w, w), (-1, w), (-1, -w), (-w, -w)]  # fmt: skip
    turns = [i * math.tau / 36 for i in range(36)]
    return [
        (
            math.sin(t) ** 3,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16,
        )
        for t in turns
    ]


def _turned(points: Points, angle: float, x: float, y: float, size: float) -> Points:
    cos, sin = math.cos(angle) * size, math.sin(angle) * size
    return [(x + px * cos - py * sin, y + px * sin + py * cos) for px, py in points]


def _stroke(draw: ImageDraw.ImageDraw, points: Points, width: float) -> None:
    draw.line(points, fill=255, width=max(2, round(width)), joint="curve")
    radius = width / 2
    for x, y in (points[0], points[-1]):
        draw.ellipse((x - radius, y - radius, x + radius, y + radius), fill=255)


def _places(rng: Random, count: int, box: tuple[float, float, float, float]) -> list[Points]:
    """Choose centres and radii that do not touch: a list of [(x, y), (radius, 0)]."""
    left, top, right, bottom = box
    room = min(right - left, bottom - top)
    largest = {1: 0.48, 2: 0.27, 3: 0.24, 4: 0.22, 5: 0.19}[count] * room
    smallest = (0.16 if count == 1 else 0.11) * room
    while True:
        common = rng.uniform(smallest, largest)
        placed: list[Points] = []
        for _ in range(60):
            radius = min(largest, common * rng.uniform(0.85, 1.15))
            x = rng.uniform(left + radius, right - radius)
            y = rng.uniform(top + radius, bottom - radius)
            gap = 1.08 * radius
            if all(math.dist((x, y), p[0]) > gap + p[1][0] + 0.01 * room for p in placed):
                placed.append([(x, y), (radius, 0)])
            if len(placed) == count:
                return placed


def _box(rng: Random) -> tuple[tuple[float, float, float, float], tuple[int, int]]:
    """Choose the picture's place: mostly the whole square, sometimes between two bars."""
    side = SIZE * SCALE
    if rng.random() < 0.75:
        return (0, 0, side, side), (0, 0)
    bar = rng.randint(2, 16)
    if rng.random() < 0.7:  # wider than high
        return (0, bar * SCALE, side, side - bar * SCALE), (0, bar)
    return (bar * SCALE, 0, side - bar * SCALE, side), (bar, 0)


def draw_shapes(rng: Random, *, large: bool = False) -> Drawing:
    """Draw one to five of a shape, filled or as outlines. A ``large`` one is not shrunk."""
    shape, count = rng.choice(SHAPES), rng.randint(1, MOST)
    picture = Image.new("L", (SIZE * SCALE, SIZE * SCALE))
    draw = ImageDraw.Draw(picture)
    box, bars = _box(rng)
    filled = rng.random() < 0.7
    for (x, y), (radius, _) in _places(rng, count, box):
        tilt = rng.gauss(0, 0.12)
        points = _turned(outline(shape, rng), tilt, x, y, radius * 0.98)
        if filled:
            draw.polygon(points, fill=255)
        else:
            width = max(SCALE * 1.1, radius * rng.uniform(0.1, 0.24))
            points = _turned(outline(shape, rng), tilt, x, y, radius - width / 2)
            _stroke(draw, [*points, points[0], points[1]], width)
    return _finished(picture, shape, count, bars, large)


def draw_digit(rng: Random, *, large: bool = False) -> Drawing:
    """Write a digit the way a hand does: no two alike. A ``large`` one is not shrunk."""
    digit = rng.randint(0, 9)
    picture = Image.new("L", (SIZE * SCALE, SIZE * SCALE))
    draw = ImageDraw.Draw(picture)
    (left, top, right, bottom), bars = _box(rng)
    high = (bottom - top) * rng.uniform(0.42, 0.92)
    wide = min(high * rng.uniform(0.42, 0.85), (right - left) * 0.9)
    width = min(rng.uniform(0.03, 0.17) * high, 0.4 * wide)
    slant, turn, shake = rng.gauss(0, 0.13), rng.gauss(0, 0.08), rng.uniform(0, 0.035)
    cos, sin = math.cos(turn), math.sin(turn)
    spare_x = max(0.0, (right - left - wide) / 2 - width)
    spare_y = max(0.0, (bottom - top - high) / 2 - width)
    x = (left + right) / 2 + rng.uniform(-1, 1) * spare_x * 0.8
    y = (top + bottom) / 2 + rng.uniform(-1, 1) * spare_y * 0.9
    for stroke in rng.choice(DIGITS[digit]).split("|"):
        points: Points = []
        for pair in stroke.split():
            px, py = (float(value) + rng.gauss(0, shake) - 0.5 for value in pair.split(","))
            px, py = (px - slant * py) * wide, py * high
            points.append((x + px * cos - py * sin, y + px * sin + py * cos))
        _stroke(draw, smooth(points), width)
    return _finished(picture, None, digit, bars, large)


def draw_print(
    rng: Random, fonts: Sequence[Digits], share: tuple[float, float], *, large: bool = False
) -> Drawing:
    """Print a digit whose height is a share of the picture's. A ``large`` one is not shrunk."""
    digit = rng.randint(0, 9)
    picture = Image.new("L", (SIZE * SCALE, SIZE * SCALE))
    (left, top, right, bottom), bars = _box(rng)
    ink = rng.choice(fonts)[digit]
    high = (bottom - top) * rng.uniform(*share)
    wide = min(ink.width * high / ink.height * rng.uniform(0.93, 1.07), (right - left) * 0.92)
    ink = ink.resize((max(1, round(wide)), round(high)), Image.Resampling.BOX)
    x = rng.uniform(left, right - ink.width)
    y = rng.uniform(top, bottom - ink.height)
    picture.paste(ink, (round(x), round(y)))
    turned = picture.rotate(rng.gauss(0, 1.5), Image.Resampling.BILINEAR)
    return _finished(turned, None, digit, bars, large)


def _finished(
    picture: Image.Image, shape: str | None, number: int, bars: tuple[int, int], large: bool
) -> Drawing:
    if large:
        return Drawing(np.asarray(picture), shape, number, (bars[0] * SCALE, bars[1] * SCALE))
    small = picture.resize((SIZE, SIZE), Image.Resampling.BOX)
    return Drawing(np.asarray(small), shape, number, bars)


def drawing(
    rng: Random,
    *,
    large: bool = False,
    shapes: float = 0.5,
    fonts: Sequence[Digits] = (),
) -> Drawing:
    """Draw a digit, or shapes in this share. With fonts, half of the digits are printed."""
    if rng.random() < shapes:
        return draw_shapes(rng, large=large)
    if fonts and rng.random() < 0.5:
        return draw_print(rng, fonts, PRINTED, large=large)
    return draw_digit(rng, large=large)
