"""The reasoning budget: how many tokens a model may think before it must answer."""

from __future__ import annotations

from trioserve.engine.text.triggers import ReasoningScanner
from trioserve.types import ThinkingBudget, TokenId


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
        """Take the bytes of the next token."""
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
