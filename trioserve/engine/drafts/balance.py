"""`Balance`: what drafts have brought so far. They may lose one step in two hundred of all."""

from __future__ import annotations


class Balance:
    """Counts in steps without drafts what drafts have gained and lost.

    Whether drafts pay is found out by trying, and texts change, so there are losses. While they
    outweigh the gains, nothing is drafted; with every step a little is forgiven.
    """

    #: What may be lost before anything is gained.
    START = 2.0
    #: What is forgiven in each step.
    ALLOWANCE = 0.005
    #: The most that is to the good: what was gained long ago pays for no loss today.
    MOST = 20.0

    def __init__(self) -> None:
        self._steps = self.START

    @property
    def is_good(self) -> bool:
        """Whether there may be drafts."""
        return self._steps > 0

    def add(self, n_accepted: int, n_streams: int, cost: float) -> None:
        """Count a step that took `cost` times as long as one without drafts.

        Drafts have brought its streams so many tokens, all together.
        """
        self._steps = min(self.MOST, self._steps + n_accepted / n_streams - (cost - 1))

    def forgive(self) -> None:
        """Count a step without drafts."""
        if self._steps < self.START:
            self._steps += self.ALLOWANCE
