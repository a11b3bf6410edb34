"""Colouring: drawings become pictures in new colours."""

from __future__ import annotations

import colorsys
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt

from examples.bundled_model.vision.drawings import COLORS, Drawing, drawing

#: The bars of libmtmd beside a picture that is not square.
BAR = np.array([122, 116, 104], np.float32) / 255
NAMES = tuple(COLORS)

Color = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Picture:
    """The content of a painted drawing."""

    color: str
    shape: str | None
    number: int


def _hsv(hue: float, saturation: float, value: float) -> Color:
    return np.array(colorsys.hsv_to_rgb(hue % 1, saturation, value), np.float32)


def _ink(rng: Random, name: str) -> Color:
    return _hsv(*(rng.uniform(low, high) for low, high in COLORS[name]))


def _paper(rng: Random, ink: str) -> Color:
    """Choose a background on which the ink can be seen."""
    roll = rng.random()
    if ink == "white" or (roll < 0.15 and ink != "black"):
        return _hsv(rng.random(), rng.uniform(0, 0.7), rng.choice((0.0, rng.uniform(0, 0.25))))
    if roll < 0.75:
        return np.ones(3, np.float32)
    return _hsv(rng.random(), rng.uniform(0, 0.12), rng.uniform(0.86, 1))


def choose_color(rng: Random, drawing: Drawing) -> str:
    """Choose the ink: a digit is often black."""
    if drawing.is_digit and rng.random() < 0.35:
        return "black"
    return rng.choice(NAMES)


def paint(rng: Random, drawing: Drawing, color: str) -> npt.NDArray[np.float32]:
    """Return the picture as (3, size, size), from 0 to 1."""
    ink, paper = _ink(rng, color), _paper(rng, color)
    cover = drawing.ink.astype(np.float32)[None] / 255
    picture = paper[:, None, None] + cover * (ink - paper)[:, None, None]
    across, down = drawing.bars
    if across:
        picture[:, :, :across] = picture[:, :, -across:] = BAR[:, None, None]
    if down:
        picture[:, :down] = picture[:, -down:] = BAR[:, None, None]
    return picture.astype(np.float32)


def new_picture(rng: Random) -> tuple[Picture, npt.NDArray[np.uint8]]:
    """Draw and paint a picture as a file would hold it, large and without bars.

    Its pixels are (height, width, 3).
    """
    drawn = drawing(rng, large=True)
    return picture_of(rng, drawn, choose_color(rng, drawn))


def picture_of(rng: Random, drawn: Drawing, color: str) -> tuple[Picture, npt.NDArray[np.uint8]]:
    """Paint a large drawing as a file would hold it, without bars."""
    painted = paint(rng, drawn, color)
    across, down = drawn.bars
    painted = painted[:, down : painted.shape[1] - down, across : painted.shape[2] - across]
    pixels = (painted.transpose(1, 2, 0) * 255).round().astype(np.uint8)
    return Picture(color, drawn.shape, drawn.number), pixels
