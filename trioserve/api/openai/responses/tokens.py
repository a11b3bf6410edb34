"""Which tokens the parts of a message came from.

The parser of messages knows text, not tokens: it may hold text back, and takes markers out of it.
Here the text of the tokens is kept until its deltas come, and they are found in it.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Sequence

import attrs

from trioserve.chat.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallStart
from trioserve.types import TokenId, TokenProbs

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@attrs.define
class _Held:
    """Tokens, mostly one, that became so many characters together; `n` of them were not given."""

    n_chars: int
    n: int
    probs: list[TokenProbs]


class TokensOfText:
    """Takes the tokens and the deltas of a message, and tells which belong together.

    A token belongs to a delta when any character of its text does; to the first one, if to
    several. It makes no difference how the output is split.

    Args:
        pieces: the bytes of each token of the vocabulary.
    """

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self._pieces = pieces
        self._decoder = _Utf8Decoder(errors="replace")
        self._text = ""  # of the tokens in `_held`
        self._held: deque[_Held] = deque()
        self._partial = _Held(0, 0, [])  # tokens that end within a character

    def add(self, tokens: Sequence[TokenId], probs: Sequence[TokenProbs]) -> None:
        """Take the next tokens, with their candidates where they are wanted."""
        for i, token in enumerate(tokens):
            piece = self._pieces[token]
            if not piece:
                continue  # a control token, which has no text
            text = self._decoder.decode(piece)
            self._partial.n += 1
            self._partial.probs += probs[i : i + 1]
            if text:
                self._partial.n_chars = len(text)
                self._held.append(self._partial)
                self._partial = _Held(0, 0, [])
                self._text += text

    def take(self, deltas: Sequence[Delta]) -> list[tuple[int, list[TokenProbs]]]:
        """For each of the next deltas: the number of its tokens, and their candidates."""
        taken: list[tuple[int, list[TokenProbs]]] = []
        position = 0
        for start, end in self._find(deltas):
            n = 0
            probs: list[TokenProbs] = []
            while self._held and position < end:
                held = self._held[0]
                until = position + held.n_chars
                if until > start:
                    n, probs = n + held.n, probs + held.probs
                    held.n, held.probs = 0, []
                if until > end:  # the rest of it may be in the next delta
                    held.n_chars = until - end
                    position = end
                    break
                self._held.popleft()
                position = until
            taken.append((n, probs))
        self._text = self._text[position:]
        return taken

    def _find(self, deltas: Sequence[Delta]) -> list[tuple[int, int]]:
        """Find where deltas are, from the last one back: it is next to what is held back.

        Calls need not be as they were written, and nobody asks for their tokens. Other text that
        is not there ends with a character that was cut off: it is all that is left.
        """
        spans = []
        end = len(self._text)
        for delta in reversed(deltas):
            text = delta.name if isinstance(delta, ToolCallStart) else delta.text
            start = self._text.rfind(text, 0, end)
            if start >= 0:
                spans.append((start, start + len(text)))
                end = start
            elif isinstance(delta, ContentDelta | ReasoningDelta):
                spans.append((0, end))
                end = 0
            else:
                spans.append((0, 0))
        return spans[::-1]
