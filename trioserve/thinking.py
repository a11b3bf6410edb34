"""The places of an answer in which a model may think again."""

from __future__ import annotations

import re

#: A marker that people write, too.
_TAG = re.compile(r"<\w+>")
_QUOTES = ("`", "'", '"')
_FENCE = "```"


class ThinkingPlaces:
    """Tells markers that begin thinking from those that an answer is about.

    A tag such as ``<think>`` counts at the beginning of a line, and within one only if the model
    has thought before, the tag is not in quotes, and text follows it at once. In a block of code
    it does not. Any other marker always counts.
    """

    __slots__ = ("_in_code", "_is_tag", "_line", "_parts", "_thought")

    def __init__(self, marker: str) -> None:
        self._is_tag = _TAG.fullmatch(marker) is not None
        self._parts: list[str] = []  # the answer since it was last looked at
        self._line = ""  # the beginning of its last line, before these
        self._in_code = False
        self._thought = False

    def add(self, text: str) -> None:
        """Add the next text of the answer. A call counts as a line."""
        if self._is_tag:
            self._parts.append(text)

    def end_thinking(self) -> None:
        """Add a block of thinking."""
        self._thought = True
        self.add("\n")

    def allow(self, after: str, *, final: bool) -> bool | None:
        """True if a marker counts that comes now, with a text after it; None: more is needed."""
        if not self._is_tag:
            return True
        *lines, line = (self._line + "".join(self._parts)).split("\n")
        self._parts, self._line = [], line
        self._in_code ^= sum(_is_fence(each) for each in lines) % 2 == 1
        if self._in_code or _is_fence(line):
            return False
        if not line.strip():
            return True
        if not self._thought or line.endswith(_QUOTES):
            return False
        if not after:
            return False if final else None
        return after[0].isalnum() or after[0] == "\n"


def _is_fence(line: str) -> bool:
    return line.lstrip().startswith(_FENCE)
