"""Joins what was heard in one window after another to one text."""

from __future__ import annotations

#: From here on, most characters of Unicode belong to scripts that put no space between sentences.
_FIRST_WITHOUT_SPACES = "\u2e80"
_HANGUL = ("\uac00", "\ud7a3")


class Joiner:
    """Makes one text of pieces. White space around what windows have is replaced by one space."""

    def __init__(self) -> None:
        self._last = ""  # the last character that was told
        self._held = ""  # white space: told when something follows in the same window
        self._is_new = True  # nothing of this window has been told

    def next_window(self) -> None:
        """Begin another window."""
        self._held = ""
        self._is_new = True

    def feed(self, text: str) -> str:
        """Take a piece of a window; returns what is to be told now."""
        if self._is_new:
            text = text.lstrip()
        body = text.rstrip()
        if not body:
            self._held += text
            return ""
        before = _between(self._last, body[0]) if self._is_new else self._held
        self._held = text[len(body) :]
        self._last, self._is_new = body[-1], False
        return before + body


def _between(last: str, first: str) -> str:
    """What stands between two windows of which one ends, and the other begins with a character."""
    return " " if last and not (_needs_no_space(last) or _needs_no_space(first)) else ""


def _needs_no_space(character: str) -> bool:
    is_hangul = _HANGUL[0] <= character <= _HANGUL[1]
    return character >= _FIRST_WITHOUT_SPACES and not is_hangul
