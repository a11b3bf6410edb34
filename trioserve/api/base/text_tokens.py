"""Finds the tokens of each piece of a message, for counts and log probabilities.

The parser of messages knows text, not tokens: it may hold text back, and takes markers out of it.
So the text of the tokens is kept until its deltas come, and they are found in it. The tokens of
markers are in no delta.
"""

from __future__ import annotations

import codecs
from collections import deque
from collections.abc import Iterable, Iterator, Sequence

import attrs

from trioserve.chat.deltas import ContentDelta, Delta, ReasoningDelta, ToolCallStart
from trioserve.server.stream import ChatChunk, Completion
from trioserve.types import TokenProbs

_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


@attrs.define
class _Held:
    """Tokens, usually one, that decode to `n_chars` characters; `n` of them are not taken yet."""

    n_chars: int
    n: int
    probs: list[TokenProbs]


@attrs.define(eq=False, slots=False)
class TokensOfText:
    """Matches the tokens of a message with its deltas.

    A token belongs to the first delta that contains any character of its text. The result does not
    depend on how the output is split.
    """

    def __attrs_post_init__(self) -> None:
        self._decoder = _Utf8Decoder(errors="replace")
        self._text = ""  # of the tokens in `_held`
        self._held: deque[_Held] = deque()
        self._partial = _Held(0, 0, [])  # tokens that end within a character

    def add(self, probs: Sequence[TokenProbs]) -> None:
        """Add the next tokens, with their candidates."""
        for one in probs:
            if not one.chosen.piece:
                continue  # a control token, which has no text
            text = self._decoder.decode(one.chosen.piece)
            self._partial.n += 1
            self._partial.probs.append(one)
            if text:
                self._partial.n_chars = len(text)
                self._held.append(self._partial)
                self._partial = _Held(0, 0, [])
                self._text += text

    def match(self, event: ChatChunk) -> Iterator[tuple[Delta, int, list[TokenProbs]]]:
        """Add the tokens of an event; gives each of its deltas as `take` does."""
        self.add(event.probs)
        for delta, (n, probs) in zip(event.deltas, self.take(event.deltas), strict=True):
            yield delta, n, probs

    def take(self, deltas: Sequence[Delta]) -> list[tuple[int, list[TokenProbs]]]:
        """Return the number of tokens of each of the next deltas, and their candidates."""
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
        """Find the spans of deltas, from the last one back: it is next to the text held back.

        The text of calls may differ from the output, but their tokens are not reported. Other text
        that is not found ends with a cut-off character, so it is all of the remaining text.
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


#: The parts of a message whose tokens have log probabilities.
TEXT = (ContentDelta, ReasoningDelta)


def probs_of(chunks: Iterable[ChatChunk]) -> list[TokenProbs]:
    """Collect the candidates for the tokens of a message, those of its calls aside."""
    tokens = TokensOfText()
    matched = (each for chunk in chunks for each in tokens.match(chunk))
    return [one for delta, _, probs in matched if isinstance(delta, TEXT) for one in probs]


def probs_of_text(output: Completion) -> list[TokenProbs]:
    """The candidates for the tokens of a text, without those of a stop string after it."""
    tokens = TokensOfText()
    tokens.add(output.probs)
    ((_, probs),) = tokens.take([ContentDelta(output.text)])
    return probs
