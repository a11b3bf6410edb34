"""The cost of rows on imagined machines."""

from __future__ import annotations

from trioserve.engine.step_costs import StepCosts


class FlatCosts(StepCosts):
    """A machine on which any number of rows costs the same."""

    @property
    def largest_step(self) -> int:
        return 1000

    def is_known(self, n_rows: int) -> bool:
        return True

    def seconds(self, n_rows: int) -> float:
        return 1.0


class SteepCosts(FlatCosts):
    """A machine on which a row costs as much as a step."""

    def seconds(self, n_rows: int) -> float:
        return float(n_rows)


class HalfSteepCosts(FlatCosts):
    """A machine on which a row more costs half as much as a step with one: good drafts pay."""

    def seconds(self, n_rows: int) -> float:
        return (n_rows + 1) / 2
