"""Ending an output at the first line that is not indented far enough."""

from __future__ import annotations


class IndentStop:
    """Cuts an output where a line begins with fewer than `min_blanks` blanks.

    The first line is not looked at, because the prompt has begun it. The blanks of the line that
    ends the output stay; an empty line ends it too. However the text is split, the outcome is the
    same.
    """

    __slots__ = ("_min_blanks", "_n_blanks", "ended")

    def __init__(self, min_blanks: int) -> None:
        self._min_blanks = min_blanks
        self._n_blanks = min_blanks  # of the line so far; enough: the rest of it may be anything
        self.ended = False

    def cut(self, text: str) -> str:
        """Take the next text, and return what of it stays. Sets `ended` where the rest does not."""
        for i, char in enumerate(text):
            if self._n_blanks < self._min_blanks:
                if char not in " \t":
                    self.ended = True
                    return text[:i]
                self._n_blanks += 1
            elif char == "\n":
                self._n_blanks = 0
        return text
