"""`Balance`: what drafts have brought so far. They may lose one tick in two hundred of all."""

from __future__ import annotations


class Balance:
    """Counts in ticks without drafts what drafts have gained and lost.

    Whether drafts pay is found out by trying, and texts change, so there are losses. While they
    outweigh the gains, nothing is drafted; with every tick a little is forgiven.
    """

    #: What may be lost before anything is gained.
    START = 2.0
    #: What is forgiven in each tick.
    ALLOWANCE = 0.005
    #: The most that is to the good: what was gained long ago pays for no loss today.
    MOST = 20.0

    def __init__(self) -> None:
        self._ticks = self.START

    @property
    def is_good(self) -> bool:
        """Whether there may be drafts."""
        return self._ticks > 0

    def add(self, n_accepted: int, n_streams: int, cost: float) -> None:
        """Count a tick that took `cost` times as long as one without drafts.

        Drafts have brought its streams so many tokens, all together.
        """
        self._ticks = min(self.MOST, self._ticks + n_accepted / n_streams - (cost - 1))

    def forgive(self) -> None:
        """Count a tick without drafts."""
        if self._ticks < self.START:
            self._ticks += self.ALLOWANCE
