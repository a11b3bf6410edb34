"""From the bytes of tokens to text that may be shown: whole characters, no stop strings."""

from __future__ import annotations

from bisect import bisect_right
from codecs import utf_8_decode


class Detokenizer:
    """Turns the pieces of one output into text.

    A token may hold a part of a character, and a stop string may be spread over tokens. So text
    is held back while it is the beginning of a character or of a stop string. However the bytes
    are split into pieces, the text and the stop string found are the same: the stop string that
    is complete first wins, and of two that end together the longer one.
    """

    __slots__ = ("_first", "_held", "_longest", "_stops", "stopping_word", "tail")

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        #: The bytes of a character that is not complete.
        self.tail = b""
        self._stops = _prepare(stops)
        self._first = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""
        self.stopping_word = ""

    def feed(self, piece: bytes) -> str:
        """Take the bytes of a token; return the text that may be shown now.

        After a stop string was found (`stopping_word` is set) nothing more may be fed.
        """
        if self.tail:
            piece = self.tail + piece
        text, n_read = utf_8_decode(piece, "replace")
        self.tail = piece[n_read:]
        return self._release(text) if self._stops else text

    @property
    def is_whole(self) -> bool:
        """Whether the bytes so far end with a whole character."""
        return not self.tail

    def flush(self) -> str:
        """Return the text that is held back, at the end of the output.

        Bytes that never became a character are shown as U+FFFD.
        """
        if self.stopping_word:
            return ""
        text, self.tail = self.tail.decode(errors="replace"), b""
        if not self._stops:
            return text
        shown = self._release(text)
        if not self.stopping_word:
            shown, self._held = shown + self._held, ""
        return shown

    def _release(self, text: str) -> str:
        text = self._held + text
        found: tuple[int, int] | None = None  # where the stop string ends, and where it starts
        cut = len(text)  # where the longest tail begins that may become a stop string
        for start, letter in enumerate(text):
            if letter not in self._first:
                continue
            if found is not None and start >= found[0]:
                break
            tail = text[start : start + self._longest]
            # No stop string begins with another one, so at most one is at this place, and it sorts
            # right before what follows. One that begins with the tail sorts right after it.
            place = bisect_right(self._stops, tail)
            if place and tail.startswith(before := self._stops[place - 1]):
                found = min(found or (len(text) + 1, 0), (start + len(before), start))
            elif cut == len(text) and any(
                stop.startswith(tail) for stop in self._stops[place : place + 1]
            ):
                cut = start
        if found is not None:
            end, start = found
            self.stopping_word = text[start:end]
            self._held = ""
            return text[:start]
        self._held = text[cut:]
        return text[:cut]


def _prepare(stops: tuple[str, ...]) -> tuple[str, ...]:
    """Sort stop strings, without those that begin with another one, which is complete first."""
    kept: list[str] = []
    for stop in sorted(filter(None, stops)):
        if not kept or not stop.startswith(kept[-1]):
            kept.append(stop)
    return tuple(kept)


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
        """Take the next text; return the part to keep. Sets `ended` if that is not all of it."""
        for i, char in enumerate(text):
            if self._n_blanks < self._min_blanks:
                if char not in " \t":
                    self.ended = True
                    return text[:i]
                self._n_blanks += 1
            elif char == "\n":
                self._n_blanks = 0
        return text
