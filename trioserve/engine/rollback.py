"""`Rollback`: how far a sequence goes back after a decode."""

from __future__ import annotations

import attrs


@attrs.frozen(kw_only=True)
class Rollback:
    """The rules for one step back after a decode, if guesses at the end of a sequence were wrong.

    The step is `n_max` tokens at most; 0: no step is possible. Where `n_together` is not 0, all
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
        """True if all drafts in a decode must have the same length."""
        return self.n_together > 0
