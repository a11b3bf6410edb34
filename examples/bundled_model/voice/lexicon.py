"""The words of the voice, and how a text becomes its tokens.

A space, a known word and a letter are tokens. A word in capitals has the same embedding, and
so have the signs that are spoken alike.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from random import Random
from unicodedata import normalize

from examples.bundled_model.corpus import documents
from examples.bundled_model.sound.speech import WORDS as DIGITS
from examples.bundled_model.vision.drawings import SHAPES
from examples.bundled_model.vision.paint import NAMES as COLORS

SPACE = "▁"
#: Begins the frames.
BEGIN = "<|audio_bos|>"
#: Silent frames that follow a sign.
PAUSES = {".": 3, ",": 2}
SAME = {"!": ".", "?": ".", ";": ",", ":": ",", "\N{RIGHT SINGLE QUOTATION MARK}": "'"}
LETTERS = "abcdefghijklmnopqrstuvwxyz'"
OTHERS = '"#$%&()*+-/<=>@[\\]^_`{|}~…“”„«»—•·°€£§©'
#: Letters with accents are spoken as those without.
ACCENTED = range(0xC0, 0x180)
NUMBERS = (
    "ten", "eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen",
    "eighteen", "nineteen", "twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty",
    "ninety", "hundred", "thousand",
)  # fmt: skip


def frequent(count: int) -> list[str]:
    """Return the words that the bundled model's answers have most often."""
    words: Counter[str] = Counter()
    for document in islice(documents(3), 4000):
        for message in document.messages or ():
            if message["role"] == "assistant" and isinstance(message.get("content"), str):
                words.update(re.findall(r"[a-z]+(?:'[a-z]+)?", message["content"].lower()))
    return [word for word, _ in words.most_common(count)]


def lexicon(count: int = 450) -> tuple[str, ...]:
    """Return what the voice says: digits first."""
    plurals = (*(f"{shape}s" for shape in SHAPES if shape != "cross"), "crosses")
    special = (*DIGITS, *NUMBERS, *COLORS, *SHAPES, *plurals, *LETTERS[:-1])
    return tuple(dict.fromkeys((*special, *frequent(count))))


class Tokens:
    """The vocabulary: rows of the embedding table, and the pieces that stand for them."""

    def __init__(self, words: tuple[str, ...]) -> None:
        known = [word for word in words if len(word) > 2]
        self.rows = (BEGIN, SPACE, *PAUSES, *LETTERS, *"0123456789", *known)
        self.row = {piece: index for index, piece in enumerate(self.rows)}
        self.known = frozenset(known)

    def pieces(self) -> list[tuple[str, int]]:
        """Return every piece of the finished vocabulary and its row."""
        made = dict(self.row)
        for piece, row in self.row.items():
            if piece[0] in LETTERS:
                made[piece.capitalize()] = made[piece.upper()] = row
        for letter in map(chr, ACCENTED):
            plain = normalize("NFD", letter)[0].lower()
            if plain in LETTERS:
                made[letter] = self.row[plain]
        made |= {sign: self.row[same] for sign, same in SAME.items()}
        made |= dict.fromkeys(OTHERS, self.row[SPACE])
        return list(made.items())

    def write(self, rng: Random, word: str, digit: str | None, spell: float) -> list[int]:
        """Write a word with a space before it: as itself, as letters, or as a digit."""
        if digit and rng.random() < 0.5:
            written = [digit]
        elif word in self.known and rng.random() >= spell:
            written = [word]
        else:
            written = list(word)
        return [self.row[SPACE], *(self.row[piece] for piece in written)]
