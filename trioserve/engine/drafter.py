"""What the engine asks of a drafter: guesses of the tokens that come next.

A guess costs nothing but time. The engine decodes it together with the newest token, and keeps
what the request's own sampler would have chosen anyway. So the output is the same as without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import attrs

from trioserve.types import CacheRoot, TokenId


@attrs.frozen
class DraftRequest:
    """A slot in decode that may have a draft in this step."""

    #: From 0 to ``n_slots - 1``. It is the same from the first request for a run until `forget`.
    slot_id: int
    #: All of the text so far, without media: the prompt and the output. The newest token is the
    #: last. It may belong to the engine, which adds to it after the call: to be read, not kept or
    #: changed.
    keys: Sequence[TokenId]
    #: Nothing that was learned from a text may be used for one with another root: it would show
    #: in how long that takes.
    root: CacheRoot
    n_max: int  # the most tokens that the draft may have; at least 1


class Drafter(Protocol):
    """Guesses the next tokens of slots. Called from the inference thread, between decodes."""

    @property
    def name(self) -> str:
        """The type of speculative decoding, as `--spec-type` calls it."""

    @property
    def is_free(self) -> bool:
        """Whether a guess takes next to no time.

        Then the drafter is asked for a new guess as soon as all of the last one was right, or a
        token of it was wrong, and the guess is compared with the output even where it does not pay
        to decode it. Others are asked only where their drafts are expected to pay, their own time
        included, and now and then to find out whether they do.
        """

    @property
    def n_max(self) -> int:
        """The most tokens of a guess; it is not asked for more."""

    @property
    def step_s(self) -> float:
        """Seconds for each token of the longest draft, as measured lately; 0: next to none.

        Without the time for what is over soon, such as reading a long prompt.
        """

    def propose(self, requests: Sequence[DraftRequest]) -> Sequence[Sequence[TokenId]]:
        """Guess for each request what follows its last key.

        All requests of a step come at once, so that they can be worked on together. Slots that
        are in prefill, or have a draft by another drafter, are not among them, and may be in the
        next step. Between two calls a slot's keys grow by what was accepted, and what the sampler
        chose itself.

        Returns:
            A draft for each request, at most `DraftRequest.n_max` long; empty where there is no
            guess. All of its tokens are in the vocabulary of the model.
        """

    def forget(self, slot_id: int) -> None:
        """Drop what is known of a slot: its run has ended, or the text is another one.

        What comes next for this slot may have nothing in common with what it had.
        """

    def close(self) -> None:
        """Free everything. Closing twice is fine. The slots need not be forgotten before."""
