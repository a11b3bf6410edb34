"""TextParts: cuts text into parts that have, one after the other, the tokens of the whole.

llama.cpp first finds the special tokens in a text (control tokens, and those that users added) and
then makes tokens of what is between them. The time for the first step grows with the square of
their number: 100,000 take half a minute. What is between two of them is tokenized by itself, so
text may be cut beside a special token, unless

- it overlaps another one: llama.cpp takes the longest of all first, not the one that comes first.
  A row of special tokens that overlap is cut at the longest one, if none is as long;
- the cut is beside a blank, and special tokens of the vocabulary take away the blanks beside them.

With a SentencePiece vocabulary, the time also grows with the square of the number of bytes that
have no other token. Such text is cut before characters that no token has after its first.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

import attrs

#: A part ends where it may, once it has so many special tokens or characters.
MAX_SPECIALS = 256
MAX_CHARS = 4096

_BLANKS = " \t\n\r\f\v"  # as C's isspace


@attrs.frozen
class Part:
    """A part of a text. `follows_text`: no special token is beside the cut before it."""

    text: str
    follows_text: bool = False


class TextParts:
    """Knows where text can be cut, for one vocabulary.

    Args:
        specials: the names that llama.cpp looks for in text.
        only_first: finds a character that no token has after its first; None if text between
            special tokens must not be cut.
        strips_left: whether a special token takes away the blanks before it.
        strips_right: whether one takes away those after it.

    Raises:
        RecursionError: the names are too much alike to be made into a pattern.
    """

    def __init__(
        self,
        specials: Collection[str],
        *,
        only_first: re.Pattern[str] | None = None,
        strips_left: bool = False,
        strips_right: bool = False,
    ) -> None:
        self._pattern = _longest_of(specials)
        self._only_first = only_first
        self._strips_left, self._strips_right = strips_left, strips_right
        prefixes = {name[:n] for name in specials for n in range(1, len(name))}
        #: Names inside of which another one may begin that ends after them.
        self._open = {
            name for name in specials if any(name[n:] in prefixes for n in range(1, len(name)))
        }

    def split(self, text: str) -> Iterator[Part]:
        """Yield the parts of a text, in order."""
        start = n_specials = 0
        follows_text = False
        for place, n_found, in_text in self._places(text):
            n_specials += n_found
            is_due = n_specials >= MAX_SPECIALS or place - start >= MAX_CHARS
            if is_due and place > start and (in_text or self._is_safe(text, place)):
                yield Part(text[start:place], follows_text)
                start, n_specials, follows_text = place, 0, in_text
        if start < len(text):
            yield Part(text[start:], follows_text)

    def _places(self, text: str) -> Iterator[tuple[int, int, bool]]:
        """Yield where a text may be cut, the special tokens passed, and if that is within text."""
        end = 0
        while (found := self._pattern.search(text, end)) is not None:
            start, stop = found.span()
            for place in self._places_in_text(text, end, start):
                yield place, 0, True
            longest = found[0]
            if found[0] in self._open:
                stop, longest = self._row(text, start, stop)
            if stop == found.end():
                yield start, 0, False
                yield stop, 1, False
            elif longest and not self._strips_in(text[start:stop]):
                place = text.find(longest, start, stop)
                while place >= 0:
                    yield place, 1, False
                    place = text.find(longest, place + len(longest), stop)
            end = stop
        for place in self._places_in_text(text, end, len(text)):
            yield place, 0, True

    def _row(self, text: str, start: int, stop: int) -> tuple[int, str]:
        """Follow special tokens that overlap.

        Returns where the last one ends, and the longest one; this is empty if there are several.
        """
        longest = {text[start:stop]}
        place = start
        while (place := place + 1) < stop:
            if (found := self._pattern.match(text, place)) is not None:
                stop = max(stop, found.end())
                size = len(next(iter(longest)))
                if len(found[0]) > size:
                    longest = {found[0]}
                elif len(found[0]) == size:
                    longest.add(found[0])
        return stop, longest.pop() if len(longest) == 1 else ""

    def _places_in_text(self, text: str, start: int, stop: int) -> Iterator[int]:
        """Yield some places where text without special tokens can be cut."""
        if self._only_first is None or stop - start < 2:
            return
        if self._strips_right and start > 0:
            start += len(text[start:stop]) - len(text[start:stop].lstrip(_BLANKS))
        if self._strips_left and stop < len(text):
            stop -= len(text[start:stop]) - len(text[start:stop].rstrip(_BLANKS))
        while (found := self._only_first.search(text, start + 1, stop)) is not None:
            yield found.start()
            start = found.start() + MAX_CHARS // 4

    def _strips_in(self, row: str) -> bool:
        """Whether blanks of a row of special tokens may be taken away."""
        return (self._strips_left or self._strips_right) and not set(_BLANKS).isdisjoint(row)

    def _is_safe(self, text: str, place: int) -> bool:
        """Whether no special token takes away blanks on both sides of a place."""
        return not (
            (self._strips_left and place > 0 and text[place - 1] in _BLANKS)
            or (self._strips_right and place < len(text) and text[place] in _BLANKS)
        )


def _longest_of(names: Collection[str]) -> re.Pattern[str]:
    """Make a pattern that matches the longest of the names that a text has at a place."""
    root: dict[str, Any] = {}
    for name in names:
        node = root
        for letter in name:
            node = node.setdefault(letter, {})
        node[""] = {}
    return re.compile(_alternatives(root) if root else "(?!)")


def _alternatives(node: dict[str, Any]) -> str:
    """Write what may follow in a tree of letters; an empty one ends a name."""
    choices = []
    for letter, after in node.items():
        if not letter:
            continue
        letters = [letter]
        while len(after) == 1 and "" not in after:
            [(letter, after)] = after.items()
            letters.append(letter)
        choices.append(re.escape("".join(letters)) + _alternatives(after))
    if not choices:
        return ""
    return f"(?:{'|'.join(choices)})" + "?" * ("" in node)
