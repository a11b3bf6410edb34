"""The length of each draft: as long as its expected gain exceeds the cost of its rows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from trioserve.engine.step_costs import StepCosts

#: The least gain that drafts must be expected to bring: the rate of a stream, as a logarithm.
MARGIN = 0.02

#: Numbers of rows that a step with drafts may have, besides the most possible. Rows are cheaper in
#: groups, and the costs of a few sizes are soon measured.
SIZES = frozenset({2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256})

#: A token that is less likely to be right than this is not considered.
LEAST = 0.002


class Acceptance:
    """The likelihood that the next token of a draft is right, for one slot and one drafter.

    Right tokens count, and each draft's first mistake. A mistake reduces the weight of all before.
    """

    #: The weight of earlier tokens after a mistake, as a factor.
    MEMORY = 0.6
    #: The most right tokens that count, so that the end of a repetition is soon noticed.
    MOST = 256.0

    #: The number of tokens of other texts that count.
    FEW = 4.0

    __slots__ = ("_n_right", "_n_wrong")

    def __init__(self, n_right: float = 1.0, n_wrong: float = 1.0) -> None:
        self._n_right, self._n_wrong = n_right, n_wrong

    def observe(self, n_right: int, *, wrong: bool) -> None:
        """Learn that `n_right` tokens were right, and whether the next one was wrong."""
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
        """The probability that a token is right, if those before it are."""
        return self._n_right / (self._n_right + self._n_wrong)


def share_rows(
    limits: Sequence[int],
    chances: Sequence[float],
    costs: StepCosts,
    n_streams: int,
    n_rows: int,
    step_s: float = 0.0,
    is_even: bool = False,
) -> list[int]:
    """Choose how many tokens of each draft to decode.

    The more rows a step has, the longer all streams wait for it. So this maximizes the sum of the
    logarithms of the streams' rates: no stream gains at the expense of others.

    Args:
        limits: the most tokens of each draft.
        chances: of each draft, the probability of a token to be right if those before it are.
        costs: of steps.
        n_streams: how many slots decode, with or without a draft.
        n_rows: the rows of the step without these drafts.
        step_s: seconds to make drafts, for each token of the longest.
        is_even: all streams have as many rows as that with the longest draft.
    """
    shares = [0] * len(limits)
    if not costs.is_known(n_rows):
        return shares  # first measure what a step costs without drafts
    plain = costs.seconds(n_rows)
    best, best_worth, gain = list(shares), MARGIN * n_streams, 0.0
    expected = [1.0] * len(limits)  # tokens in this step
    bring = list(chances)  # the chance that all tokens of a draft are right, and one more
    most = costs.largest_step
    n_longest, n_next = 0, n_rows
    while any(limit > share for limit, share in zip(limits, shares, strict=True)):
        gains = [
            bring[i] / expected[i] if shares[i] < limits[i] else 0.0 for i in range(len(limits))
        ]
        best_gain = max(gains)
        if best_gain < LEAST:
            break
        ones = range(len(gains)) if is_even else (gains.index(best_gain),)
        for one in (one for one in ones if gains[one]):
            gain += math.log1p(gains[one])
            expected[one] += bring[one]
            bring[one] *= chances[one]
            shares[one] += 1
        n_longest = max(n_longest, *shares)
        n_next = max(n_rows, n_streams * (1 + n_longest)) if is_even else n_next + 1
        if n_next > most:
            break
        if is_even or n_next in SIZES or n_next == most or shares == list(limits):
            seconds = costs.seconds(n_next) + step_s * n_longest
            worth = gain - n_streams * math.log(seconds / plain)
            if worth > best_worth:
                best, best_worth = list(shares), worth
    return best
