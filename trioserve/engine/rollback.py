"""`Rollback`: how far a sequence goes back after a decode."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Rollback:
    """How a sequence goes back after a decode, once, where the guesses at its end were wrong.

    It goes back by `n_max` tokens at most; 0: not at all. Where `n_together` is not 0, all
    sequences with guesses must have equally many rows, one prompt at most may be beside them, and
    equally many rows of each are `n_together` at most. llama.cpp computes these together; otherwise
    it may move a state without those that it went through. With `needs_state`, a state is saved
    before the decode, and what was right is decoded again.
    """

    n_max: int = 0
    n_together: int = 0
    needs_state: bool = False

    @property
    def is_even(self) -> bool:
        """Whether guesses are of one length."""
        return self.n_together > 0
