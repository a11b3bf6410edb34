"""From the bytes of tokens to text that may be shown: whole characters, no stop strings."""

from __future__ import annotations

from bisect import bisect_right
from codecs import utf_8_decode

from trioserve.engine.reasoning import TriggerScanner
from trioserve.thinking import ThinkingPlaces
from trioserve.types import Aside

_BLANKS = " \t\n\r"


class Detokenizer:
    """Turns the pieces of one output into text.

    A token may hold a part of a character, and a stop string may be spread over tokens. So text
    is held back while it is the beginning of a character or of a stop string. However the bytes
    are split into pieces, the text and the stop string found are the same: the stop string that
    is complete first wins, and of two that end together the longer one.

    Args:
        stops: the stop strings.
        aside: where they do not count.
    """

    __slots__ = ("_answer", "_stops", "stopping_word", "tail")

    def __init__(self, stops: tuple[str, ...] = (), aside: Aside | None = None) -> None:
        #: The bytes of a character that is not complete.
        self.tail = b""
        self._stops = _Stops(stops) if any(stops) else None
        self._answer = _Answer(self._stops, aside) if self._stops and aside else None
        self.stopping_word = ""

    def feed(self, piece: bytes) -> str:
        """Take the bytes of a token; return the text that may be shown now.

        After a stop string was found (`stopping_word` is set) nothing more may be fed.
        """
        if self.tail:
            piece = self.tail + piece
        text, n_read = utf_8_decode(piece, "replace")
        self.tail = piece[n_read:]
        return self._release(text, final=False) if self._stops else text

    @property
    def is_whole(self) -> bool:
        """True if the bytes so far end with a whole character."""
        return not self.tail

    def flush(self) -> str:
        """Return the text that is held back, at the end of the output.

        Bytes that never became a character are shown as U+FFFD.
        """
        if self.stopping_word:
            return ""
        text, self.tail = self.tail.decode(errors="replace"), b""
        return self._release(text, final=True) if self._stops else text

    def _release(self, text: str, *, final: bool) -> str:
        assert self._stops is not None
        shown, self.stopping_word = (self._answer or self._stops).release(text, final=final)
        return shown


class _Stops:
    """Finds the first of several strings in text that comes in pieces."""

    __slots__ = ("_first", "_held", "_longest", "_stops")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = _prepare(stops)
        self._first = frozenset(stop[0] for stop in self._stops)
        self._longest = max(map(len, self._stops), default=0)
        self._held = ""

    def release(self, text: str, *, final: bool) -> tuple[str, str]:
        """Take the next text; return what may be shown, and the string that follows it, or ""."""
        text = self._held + text
        start, stop, cut = self.find(text)
        self._held = "" if stop or final else text[cut:]
        return text[: start if stop else len(text) - len(self._held)], stop

    def find(self, text: str) -> tuple[int, str, int]:
        """Find the string that is complete first: its place, or 0, and which it is, or "".

        Also gives the place where the longest tail begins that may become one.
        """
        found: tuple[int, int] | None = None  # where the stop string ends, and where it starts
        cut = len(text)
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
        if found is None:
            return 0, "", cut
        return found[1], text[found[1] : found[0]], cut


class _Answer:
    """Finds stop strings in the answer, outside the other parts of an output."""

    __slots__ = (
        *("_aside", "_begun", "_ends", "_held", "_is_aside", "_is_over"),
        *("_n_placed", "_places", "_stops"),
    )
    _ends: TriggerScanner  # of a part outside the answer
    _is_over: bool  # whether its end has come, and only newlines since

    def __init__(self, stops: _Stops, aside: Aside) -> None:
        self._stops, self._aside = stops, aside
        self._places = ThinkingPlaces(aside.start)
        self._held = ""
        self._n_placed = 0  # how much of `_held` is in `_places`
        self._begun = False  # whether there has been more than blanks
        self._is_aside = False  # whether this is no part of the answer
        if aside.begun is not None:
            self._leave()
            self._pass(aside.begun)

    def release(self, text: str, *, final: bool) -> tuple[str, str]:
        """Take the next text, as `_Stops` does."""
        text, self._held = self._held + text, ""
        shown = ""
        while True:
            if self._is_aside:
                count = self._pass(text)
                shown, text = shown + text[:count], text[count:]
                if self._is_aside:
                    return shown, ""
            count, stop = self._answer(text, final=final)
            shown, text = shown + text[:count], text[count:]
            if not self._is_aside:
                self._held = text
                return shown, stop

    def _leave(self) -> None:
        self._begun = self._is_aside = True
        self._is_over = False
        self._n_placed = 0
        self._ends = TriggerScanner(None, self._aside.ends)

    def _pass(self, text: str) -> int:
        """Pass text that is no part of the answer, with the newlines after it; return how much."""
        rest = text
        if not self._is_over:
            found = self._ends.feed(text.encode())
            if found is None:
                return len(text)
            self._is_over = True
            self._places.end_thinking()
            rest = found.decode()
        answer = rest.lstrip("\n")
        self._is_aside = not answer
        return len(text) - len(answer)

    def _answer(self, text: str, *, final: bool) -> tuple[int, str]:
        """Read text of the answer; return how much of it to show, and the stop string after it."""
        marker = self._aside.start
        if not self._begun:
            bare = text.lstrip(_BLANKS)
            if bare.startswith(marker):
                self._leave()
                return len(text) - len(bare) + len(marker), ""
            if marker.startswith(bare) and not final:
                return 0, ""
            self._begun = True
        start, stop, cut = self._stops.find(text)
        until = start + len(stop) if stop else len(text)
        # A word is a marker at the beginning alone.
        place = -1 if marker[0].isalpha() else text.find(marker, self._n_placed, until)
        while place >= 0:
            end = place + len(marker)
            if end == until and len(stop) > len(marker):
                break
            self._place(text, place)
            allowed = self._places.allow(text[end:], final=final)
            if allowed:
                self._leave()
                return end, ""
            if allowed is None:
                stop, cut = "", min(cut, place)
                break
            place = text.find(marker, end, until)
        if stop:
            return start, stop
        count = len(text) if final else min(cut, len(text) - _begun_at_end(text, marker))
        self._place(text, count)
        self._n_placed -= count
        return count, ""

    def _place(self, text: str, end: int) -> None:
        """Add text of the answer to `_places`, up to a place in it."""
        if end > self._n_placed:
            self._places.add(text[self._n_placed : end])
            self._n_placed = end


def _begun_at_end(text: str, marker: str) -> int:
    """Count the characters at the end of a text that a marker begins with."""
    lengths = range(min(len(marker) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(marker[:length])), 0)


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
