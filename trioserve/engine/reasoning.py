"""Triggers and the end of reasoning in an output whose bytes come in pieces, and its budget."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy

from trioserve.types import Thinking, ThinkingBudget, TokenId

_BLANKS = b" \t\n\r"


class StringScanner:
    """Finds one of several strings in an output: the one that is complete first.

    However the output is split into pieces, the outcome is the same.
    """

    __slots__ = ("_held", "_n_held", "_texts")

    def __init__(self, texts: Sequence[str]) -> None:
        self._texts = tuple(text.encode() for text in texts)
        self._n_held = max(map(len, self._texts)) - 1
        self._held = b""

    def fork(self) -> StringScanner:
        """Copy it, to try another continuation."""
        return copy(self)

    def feed(self, piece: bytes) -> bytes | None:
        """Take the next bytes; return those that follow the text, or None before it is complete."""
        data = self._held + piece
        ends = [at + len(text) for text in self._texts if (at := data.find(text)) >= 0]
        if ends:
            return data[min(ends) :]
        self._held = data[-self._n_held :] if self._n_held else b""
        return None


class ReasoningScanner:
    """Follows an output to the end of its reasoning, if it begins with any.

    Blanks before the reasoning belong to it.
    """

    __slots__ = ("_end", "_head", "_start", "inside")

    def __init__(self, thinking: Thinking) -> None:
        self._start = thinking.start.encode()
        self._end = StringScanner((thinking.end,))
        self._head = b""  # the output so far, until it is clear whether reasoning begins
        self.inside = thinking.begun

    def fork(self) -> ReasoningScanner:
        other = copy(self)
        other._end = self._end.fork()
        return other

    @property
    def missing(self) -> bytes:
        """The bytes still to come for reasoning to begin; empty once it has."""
        return b"" if self.inside else self._start[len(self._head.lstrip(_BLANKS)) :]

    def feed(self, piece: bytes) -> bytes | None:
        """Take the next bytes; return those that follow the reasoning, or all without reasoning.

        None while it is not over, or not clear whether there is any.
        """
        if not self.inside:
            self._head += piece
            text = self._head.lstrip(_BLANKS)
            if not text.startswith(self._start):
                return None if self._start.startswith(text) else self._head
            self.inside = True
            piece = text[len(self._start) :]
        rest = self._end.feed(piece)
        if rest is not None:
            self.inside = False
        return rest


class TriggerScanner:
    """Follows an output to the place where its lazy grammar begins.

    Args:
        thinking: reasoning that the output may begin with; triggers in it do not count.
        triggers: groups of texts. One of each group is waited for, group after group.
    """

    __slots__ = ("_scanners",)

    def __init__(self, thinking: Thinking | None, triggers: Sequence[Sequence[str]]) -> None:
        self._scanners: list[StringScanner | ReasoningScanner] = [
            StringScanner(texts) for texts in triggers
        ]
        if thinking is not None:
            self._scanners.insert(0, ReasoningScanner(thinking))

    def fork(self) -> TriggerScanner:
        other = copy(self)
        other._scanners = [scanner.fork() for scanner in self._scanners]
        return other

    @property
    def missing(self) -> bytes:
        """The bytes still to come for reasoning to begin; empty once it has, or cannot."""
        first = self._scanners[0] if self._scanners else None
        return first.missing if isinstance(first, ReasoningScanner) else b""

    def feed(self, piece: bytes) -> bytes | None:
        """Take the next bytes; return what the grammar begins with, or None before it begins."""
        while self._scanners:
            rest = self._scanners[0].feed(piece)
            if rest is None:
                return None
            piece = rest
            del self._scanners[0]
        return piece


class ReasoningTracker:
    """Counts the tokens of an output's reasoning, and says when it has to be closed.

    The tokens between the two markers count, as far as the model has chosen them.
    """

    __slots__ = ("_budget", "_end_requested", "_n_left", "_scanner", "is_over")

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._scanner = ReasoningScanner(budget.thinking)
        self._n_left = budget.n_tokens
        self._end_requested = False
        self.is_over = False

    def feed(self, piece: bytes) -> None:
        if self.is_over:
            return
        was_inside = self._scanner.inside
        if self._scanner.feed(piece) is not None:
            self.is_over = True
        elif was_inside:
            self._n_left -= 1

    def end(self) -> None:
        """Ask for the end of the reasoning, if the output is in it now."""
        self._end_requested = self._scanner.inside

    def closing(self) -> tuple[TokenId, ...]:
        """Return the tokens that close the reasoning, once, when it has to end.

        Not to be called within a character.
        """
        used_up = self._budget.n_tokens >= 0 and self._n_left <= 0
        if self.is_over or not self._scanner.inside or not (used_up or self._end_requested):
            return ()
        self.is_over = True
        return self._budget.closing
