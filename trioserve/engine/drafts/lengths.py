"""The length of each draft: as long as its expected gain exceeds the cost of its rows."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import attrs


@attrs.define
class _Cost:
    seconds: float  # a moving average
    step: int  # of the last measurement


class StepCosts:
    """Learns what rows cost from the steps themselves, because machines differ.

    On a CPU, eight rows may cost as much as one row or as eight steps of one. That depends on the
    model, its context, and the load on the machine. A cost follows the changes of the others until
    it has not been measured for long; then it is unknown. Unknown costs are interpolated linearly;
    without two known ones, another row counts as half a row, or as it did when that was known.
    """

    #: Share of a new measurement in the average.
    WEIGHT = 0.25
    #: A measurement counts as at most this many times the average, and the first one as this many
    #: times the expected cost: other processes may have had the core.
    MOST = 2.0
    #: Steps after which a cost is unknown, and after which it should be measured again.
    STEPS, FRESH = 2048, 128
    #: How much of a change applies to all costs (load, length of the texts), as an exponent.
    COMMON = 0.5
    #: Up to this many rows say little about more: the second may double the cost, and the next
    #: thirty add almost nothing.
    FEW = 12
    #: What another row costs, in shares of a row, until many rows have been measured.
    GUESS = 0.5
    #: How slowly the last known value is forgotten, in steps.
    STEPS_TO_FORGET = 1000

    def __init__(self) -> None:
        self._costs: dict[int, _Cost] = {}
        self._known: list[int] = []  # their rows, in order
        self._step = 0
        self._guess = self.GUESS

    def observe(self, n_rows: int, seconds: float) -> None:
        """Learn from a step that computed `n_rows` rows."""
        self._step += 1
        cost = self._costs.get(n_rows)
        if cost is None or self._step - cost.step > self.STEPS:
            expected = self.seconds(n_rows)
            most = self.MOST * expected if expected else seconds
            self._costs[n_rows] = _Cost(min(seconds, most), self._step)
            self._known = sorted(self._costs)
        else:
            old, seconds = cost.seconds, min(seconds, cost.seconds * self.MOST)
            cost.seconds += self.WEIGHT * (seconds - old)
            cost.step = self._step
            self._scale_others(cost, cost.seconds / old if old else 1.0)
        self._forget()

    def _scale_others(self, one: _Cost, factor: float) -> None:
        """Apply a part of the change of one cost to all others."""
        factor = factor**self.COMMON
        for cost in self._costs.values():
            if cost is not one:
                cost.seconds *= factor

    def _forget(self) -> None:
        known = self._known
        if known[-1] - known[0] >= self.FEW:
            self._guess = self._slope(0, len(known) - 1) * known[0] / self._at(0)
        else:
            self._guess += (self.GUESS - self._guess) / self.STEPS_TO_FORGET
        old = [n for n, cost in self._costs.items() if self._step - cost.step > self.STEPS]
        for n_rows in old:
            del self._costs[n_rows]
        if old:
            self._known = sorted(self._costs)

    def is_known(self, n_rows: int) -> bool:
        """Whether that cost was measured lately."""
        cost = self._costs.get(n_rows)
        return cost is not None and self._step - cost.step <= self.FRESH

    @property
    def largest_step(self) -> int:
        """The most rows to try next, not many more than the largest known step."""
        return 4 * self._known[-1] + 8 if self._known else 0

    def seconds(self, n_rows: int) -> float:
        """What a step with `n_rows` rows costs; 0: not known. More rows never cost less."""
        known = self._known
        if not known:
            return 0.0
        place = bisect_left(known, n_rows)
        if place < len(known) and known[place] == n_rows:
            return self._costs[n_rows].seconds
        if place == 0:
            low, at_low, slope = known[0], self._at(0), self._slope(0, len(known) - 1)
            return max(at_low * n_rows / low, at_low + slope * (n_rows - low))
        if place < len(known):
            slope = self._slope(place - 1, place)
        else:
            slope = self._slope(0, place - 1)
            if known[-1] - known[0] < self.FEW:
                slope = min(slope, self._slope(0, 0))
        return self._at(place - 1) + slope * (n_rows - known[place - 1])

    def _at(self, place: int) -> float:
        return self._costs[self._known[place]].seconds

    def _slope(self, low: int, high: int) -> float:
        """Seconds for a row more, between two costs that are known."""
        if low == high:
            return self._guess * self._at(low) / self._known[low]
        rows = self._known[high] - self._known[low]
        return max(0.0, self._at(high) - self._at(low)) / rows


#: What drafts must be expected to bring at least: the rate of a stream, as a logarithm.
MARGIN = 0.02

#: Numbers of rows that a step with drafts may have, besides the most possible. Rows are cheaper in
#: groups, and the costs of a few sizes are soon measured.
SIZES = frozenset({2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256})

#: A token that is less likely to be right than this is not considered.
LEAST = 0.002


class Acceptance:
    """How likely the next token of a draft is right, for one slot and one drafter.

    Right tokens count, and each draft's first mistake. A mistake reduces the weight of all before.
    """

    #: The weight of earlier tokens after a mistake, as a factor.
    MEMORY = 0.6
    #: The most right tokens that count, so that the end of a repetition is soon noticed.
    MOST = 256.0

    #: How many tokens of other texts count.
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
    """
    shares = [0] * len(limits)
    if not costs.is_known(n_rows):
        return shares  # first measure what a step costs without drafts
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
