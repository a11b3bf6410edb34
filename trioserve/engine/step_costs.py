"""`StepCosts`: what steps cost by the number of their rows, as measured."""

from __future__ import annotations

from bisect import bisect_left

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
    #: The part of a change that applies to all costs (load, length of the texts), as an exponent.
    COMMON = 0.5
    #: Up to this many rows say little about more: the second may double the cost, and the next
    #: thirty add almost nothing.
    FEW = 12
    #: The cost of another row, in shares of a row, until many rows have been measured.
    GUESS = 0.5
    #: The steps in which the last known value is forgotten.
    STEPS_TO_FORGET = 1000

    def __init__(self) -> None:
        self._costs: dict[int, _Cost] = {}
        self._known: list[int] = []  # their rows, in order
        self._step = 0
        self._guess = self.GUESS

    def observe(self, n_rows: int, seconds: float) -> None:
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
            factor = (cost.seconds / old if old else 1.0) ** self.COMMON
            for other in self._costs.values():
                if other is not cost:
                    other.seconds *= factor
        self._forget()

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
        """True if that cost was measured lately."""
        cost = self._costs.get(n_rows)
        return cost is not None and self._step - cost.step <= self.FRESH

    @property
    def largest_step(self) -> int:
        """The most rows to try next, not many more than the largest known step."""
        return 4 * self._known[-1] + 8 if self._known else 0

    def seconds(self, n_rows: int) -> float:
        """The cost of a step with `n_rows` rows; 0: not known. More rows never cost less."""
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
