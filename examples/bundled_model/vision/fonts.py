"""Digits of fonts, which the eyes learn to read beside those that a hand writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from PIL import Image, ImageChops, ImageDraw, ImageFont

#: One picture for each digit, cut at its ink.
Digits = tuple[Image.Image, ...]

#: Families that the evaluation uses, and the training does not.
HELD_OUT = (
    "B612", "Cantarell", "Carlito", "Comic Neue", "Courier Prime", "Gentium", "Inter", "Jura",
    "Lato", "Oxygen", "Quattrocento", "Roboto Slab", "Vollkorn",
)  # fmt: skip
#: Families that have pictures or keys in the place of digits.
NO_DIGITS = ("D050000L", "Linux Biolinum Keyboard")
#: No text has this character.
MISSING = "\ue000"
HEIGHT = 200


def _ink(font: ImageFont.FreeTypeFont, text: str) -> Image.Image | None:
    left, top, right, bottom = (round(side) for side in font.getbbox(text))
    if right <= left or bottom <= top:
        return None
    picture = Image.new("L", (right - left, bottom - top))
    ImageDraw.Draw(picture).text((-left, -top), text, fill=255, font=font)
    box = picture.getbbox()
    return picture.crop(box) if box else None


def _same(one: Image.Image, other: Image.Image) -> bool:
    return one.size == other.size and ImageChops.difference(one, other).getbbox() is None


def _digits(font: ImageFont.FreeTypeFont) -> Digits | None:
    """Return the digits of a font, or nothing if it lacks one."""
    missing, digits = _ink(font, MISSING), []
    for digit in range(10):
        ink = _ink(font, str(digit))
        if ink is None or (missing and _same(ink, missing)):
            return None
        digits.append(ink)
    return tuple(digits)


def find(folder: Path, *, held_out: bool) -> Iterator[Digits]:
    """Yield the digits of each font in a folder: of the families held out, or of the others."""
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() not in (".otf", ".ttf", ".pfb", ".t1"):
            continue
        try:
            font = ImageFont.truetype(path, HEIGHT)
        except OSError as error:
            print(f"{path}: {error}")
            continue
        family = font.getname()[0] or ""
        if family.startswith(NO_DIGITS) or family.startswith(HELD_OUT) != held_out:
            continue
        if digits := _digits(font):
            yield digits
