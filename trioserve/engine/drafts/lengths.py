"""How long each draft is to be: as long as it is expected to bring more than its rows cost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trioserve.engine.drafts.costs import StepCosts

#: What drafts must be expected to bring at least: the rate of a stream, as a logarithm.
MARGIN = 0.02

#: Steps have so many rows with drafts, or as many as there can be. Rows come cheaper in groups, and
#: of a few sizes it is soon known what they cost.
SIZES = frozenset({2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256})

#: A token that is so unlikely to be right is not worth a look.
LEAST = 0.002


class Acceptance:
    """How likely the next token of a draft is right, for one slot and one drafter.

    What is right counts, and each draft's first mistake; after a mistake, less of what was before.
    """

    #: Share of what was seen before that counts after a mistake.
    MEMORY = 0.6
    #: The most right tokens that count: a text that stops to repeat itself is soon noticed.
    MOST = 256.0

    #: How many tokens count that were seen in other texts.
    FEW = 4.0

    __slots__ = ("_n_right", "_n_wrong")

    def __init__(self, n_right: float = 1.0, n_wrong: float = 1.0) -> None:
        self._n_right, self._n_wrong = n_right, n_wrong

    def observe(self, n_right: int, *, wrong: bool) -> None:
        """Learn that so many tokens were right, and whether the one after them was wrong."""
        self._n_right = min(self.MOST, self._n_right + n_right)
        if wrong:
            self._n_right *= self.MEMORY
            self._n_wrong = self._n_wrong * self.MEMORY + 1

    def expectation(self) -> Acceptance:
        """What to expect of another text: the same probability, as if seen in a few tokens."""
        share = self.FEW / (self._n_right + self._n_wrong)
        return Acceptance(self._n_right * share, self._n_wrong * share)

    @property
    def probability(self) -> float:
        """Of a token to be right, if those before it are."""
        return self._n_right / (self._n_right + self._n_wrong)


def share_rows(
    limits: Sequence[int],
    chances: Sequence[float],
    costs: StepCosts,
    n_streams: int,
    n_rows: int,
    step_s: float = 0.0,
) -> list[int]:
    """Say how many tokens of each draft to decode.

    The more rows a step has, the longer all streams wait for it. So what is made large is the sum
    of the logarithms of the streams' rates: one stream does not gain by what others lose.

    Args:
        limits: the most tokens of each draft.
        chances: of each draft, the probability of a token to be right if those before it are.
        costs: of steps.
        n_streams: how many slots decode, with or without a draft.
        n_rows: the rows of the step without these drafts.
        step_s: what it takes to make drafts, for each token of the longest.
    """
    shares = [0] * len(limits)
    if not costs.is_known(n_rows):
        return shares  # first of all, find out what a step costs without drafts
    plain = costs.seconds(n_rows)
    best, best_worth, gain = list(shares), MARGIN * n_streams, 0.0
    expected = [1.0] * len(limits)  # tokens in this step
    bring = list(chances)  # the chance that all tokens of a draft are right, and one more
    most = min(sum(limits), costs.largest_step - n_rows)
    for total in range(1, most + 1):
        gains = [
            bring[i] / expected[i] if shares[i] < limits[i] else 0.0 for i in range(len(limits))
        ]
        one = max(range(len(gains)), key=gains.__getitem__)
        if gains[one] < LEAST:
            break
        gain += math.log1p(gains[one])
        expected[one] += bring[one]
        bring[one] *= chances[one]
        shares[one] += 1
        if n_rows + total in SIZES or total == most:
            seconds = costs.seconds(n_rows + total) + step_s * max(shares)
            worth = gain - n_streams * math.log(seconds / plain)
            if worth > best_worth:
                best, best_worth = list(shares), worth
    return best
