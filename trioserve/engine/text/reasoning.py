"""The budget of reasoning: how long a model may think before it must answer."""

from __future__ import annotations

from trioserve.engine.text.triggers import ThoughtSpotter
from trioserve.types import ThinkingBudget, TokenId


class ThinkingWatch:
    """Follows the reasoning at the beginning of an output, and says when it is to be closed.

    The tokens between the two markers count, as far as the model has chosen them.
    """

    __slots__ = ("_budget", "_n_left", "_spotter", "_wanted", "is_over")

    def __init__(self, budget: ThinkingBudget) -> None:
        self._budget = budget
        self._spotter = ThoughtSpotter(budget.thinking)
        self._n_left = budget.n_tokens
        self._wanted = False  # it was told to end
        self.is_over = False

    def note(self, piece: bytes) -> None:
        """Take what a token brings."""
        if self.is_over:
            return
        was_inside = self._spotter.inside
        if self._spotter.feed(piece) is not None:
            self.is_over = True
        elif was_inside:
            self._n_left -= 1

    def end(self) -> None:
        """Have the reasoning closed, if the output is in it now."""
        self._wanted = self._spotter.inside

    def closing(self) -> tuple[TokenId, ...]:
        """Return the tokens to write now; they come once. Not to be asked within a character."""
        used_up = self._budget.n_tokens >= 0 and self._n_left <= 0
        if self.is_over or not self._spotter.inside or not (used_up or self._wanted):
            return ()
        self.is_over = True
        return self._budget.closing
