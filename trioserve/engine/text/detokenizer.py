"""From the bytes of tokens to text that may be shown: whole characters, no stop strings."""

from __future__ import annotations

import codecs

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer:
    """Turns the pieces of one output into text.

    A token may hold a part of a character, and a stop string may be spread over tokens. So text
    is held back while it is the beginning of a character or of a stop string. However the bytes
    are split into pieces, the text and the stop string found are the same: the stop string that
    is complete first wins, and of two that end together the longer one.
    """

    __slots__ = ("_decoder", "_held", "_stops", "stopping_word")

    def __init__(self, stops: tuple[str, ...] = ()) -> None:
        self._decoder = _Utf8Decoder(errors="replace")
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.stopping_word = ""

    def feed(self, piece: bytes) -> str:
        """Take the bytes of a token; return the text that may be shown now.

        After a stop string was found (`stopping_word` is set) nothing more may be fed.
        """
        text = self._decoder.decode(piece)
        return self._release(text) if self._stops else text

    @property
    def is_whole(self) -> bool:
        """Whether the bytes so far end with a whole character."""
        return not self._decoder.getstate()[0]

    def flush(self) -> str:
        """Return what is held back, at the end of the output.

        Bytes that never became a character are shown as U+FFFD.
        """
        if self.stopping_word:
            return ""
        text = self._decoder.decode(b"", final=True)
        if not self._stops:
            return text
        shown = self._release(text)
        if not self.stopping_word:
            shown, self._held = shown + self._held, ""
        return shown

    def _release(self, text: str) -> str:
        text = self._held + text
        found = self._find_stop(text)
        if found is not None:
            start, self.stopping_word = found
            self._held = ""
            return text[:start]
        cut = self._held_from(text)
        self._held = text[cut:]
        return text[:cut]

    def _find_stop(self, text: str) -> tuple[int, str] | None:
        """Find the stop string that is complete first: where it starts, and which it is."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop)
            if start >= 0 and (best is None or (start + len(stop), start) < best[:2]):
                best = (start + len(stop), start, stop)
        return None if best is None else (best[1], best[2])

    def _held_from(self, text: str) -> int:
        """Find where the longest tail that may become a stop string begins."""
        longest = max(map(len, self._stops)) - 1
        for start in range(max(0, len(text) - longest), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stops):
                return start
        return len(text)
