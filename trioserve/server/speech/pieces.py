"""Cuts texts into pieces to speak: at sentences if possible, else at clauses, words, anywhere."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

import attrs
from sentencex import segment

from trioserve.concurrency import check_cancelled

#: Ends of clauses and of words, with the white space behind them.
_CLAUSE = re.compile(r"[,;:—–،؛]+\s+|[、，；：]+|\s*\n\s*")  # noqa: RUF001 - wide commas
_WORD = re.compile(r"\s+")

#: Texts in a language that is not known are cut as English ones.
_DEFAULT = "en"


def sentences_of(text: str, language: str = "") -> list[str]:
    """Cut a text after each sentence and the white space behind it. Joined, they are the text."""
    # A lone surrogate, which cannot be passed on, is replaced by one character.
    sentences = segment(language or _DEFAULT, text.encode(errors="replace").decode())
    found, start = list[str](), 0
    for sentence in sentences:
        found.append(text[start : start + len(sentence)])
        start += len(sentence)
    return found


#: A link or an image of Markdown, whose text is spoken; and marks that are not. A text of nothing
#: but brackets takes no longer than others.
_LINK = re.compile(r"!?\[([^\[\]\n]*)\]\([^)\n]{0,1000}\)")
_MARKS = re.compile(r"[*`~|]+|^\s{0,3}(?:#{1,6}|>+|[-+]|={3,}|-{3,}|_{3,})(?=\s|$)", re.MULTILINE)


def without_marks(text: str) -> str:
    """Remove the marks of Markdown."""
    return _MARKS.sub("", _LINK.sub(r"\1", text))


#: Characters after which a text without an end of a sentence is cut at white space.
_LONG = 1000


class Sentences:
    """Finds the whole sentences of a text that comes in parts. Joined, they are the text."""

    def __init__(self) -> None:
        self._text = ""  # of the last sentence so far

    def feed(self, text: str) -> str:
        """Add a part; returns the sentences that are whole now."""
        self._text += text
        whole = "".join(sentences_of(self._text)[:-1])
        if not whole and len(self._text) > _LONG:
            whole = self._text[: max(map(self._text.rfind, " \n")) + 1]
        self._text = self._text[len(whole) :]
        return whole

    def rest(self) -> str:
        """Return the rest, at the end."""
        rest, self._text = self._text, ""
        return rest


def _split_after(ends: re.Pattern[str]) -> Callable[[str], list[str]]:
    """Make a function that cuts a text after each match."""

    def split(text: str) -> list[str]:
        stops = [match.end() for match in ends.finditer(text)]
        return [text[a:b] for a, b in zip([0, *stops], [*stops, len(text)], strict=True) if a < b]

    return split


@attrs.define(eq=False)
class Cutter:
    """Cuts texts into pieces that the speech model can take, each with as many sentences as fit.

    `count` gives the tokens of a text. No piece has more than `most` tokens, unless it is a single
    character.
    """

    _count: Callable[[str], int]
    _most: int
    _language: str = ""
    _ways: Sequence[Callable[[str], list[str]]] = attrs.field(init=False)

    @_ways.default
    def _ways_to_cut(self) -> Sequence[Callable[[str], list[str]]]:
        clauses, words = _split_after(_CLAUSE), _split_after(_WORD)
        return lambda text: sentences_of(text, self._language), clauses, words

    def cut(self, text: str) -> list[str]:
        """Cut a text. Joined, the pieces are the text. Long texts are for a worker thread."""
        return list(self._cut(text, 0))

    def _cut(self, text: str, way: int) -> Iterator[str]:
        check_cancelled()
        n_tokens = self._count(text) if text else 0
        if len(text) <= 1 or n_tokens <= self._most:
            yield from [text] if text else []
            return
        if way < len(self._ways):
            parts = self._ways[way](text)
        else:
            size = max(1, len(text) * self._most // (n_tokens + self._most))
            parts = [text[i : i + size] for i in range(0, len(text), size)]
        yield from self._joined([small for part in parts for small in self._cut(part, way + 1)])

    def _joined(self, parts: Sequence[str]) -> Iterator[str]:
        """Join neighbors as far as they fit."""
        start, size = 0, 0
        for i, part in enumerate(parts):
            n_tokens = self._count(part)
            if size + n_tokens > self._most and i > start:
                yield from self._checked(parts[start:i])
                start, size = i, 0
            size += n_tokens
        yield from self._checked(parts[start:])

    def _checked(self, parts: Sequence[str]) -> Iterator[str]:
        """Join parts. Rarely, together they have more tokens than alone."""
        whole = "".join(parts)
        if len(parts) == 1 or self._count(whole) <= self._most:
            yield whole
            return
        middle = len(parts) // 2
        yield from self._checked(parts[:middle])
        yield from self._checked(parts[middle:])
