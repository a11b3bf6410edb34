"""The length of drafts follows what is accepted of them, and what rows cost."""

from __future__ import annotations

import random

import pytest

from trioserve.engine.drafts.drafts import Balance
from trioserve.engine.drafts.lengths import Acceptance, share_rows
from trioserve.engine.step_costs import StepCosts


def learned(cost_of: dict[int, float]) -> StepCosts:
    costs = StepCosts()
    for n_rows, seconds in cost_of.items():
        costs.observe(n_rows, seconds)
    return costs


def test_a_cost_that_was_not_measured_lately_is_measured_again_and_then_forgotten() -> None:
    costs = learned({1: 1.0, 8: 2.0})
    for _ in range(StepCosts.FRESH + 1):
        costs.observe(8, 2.0)
    assert not costs.is_known(1) and costs.is_known(8)
    assert costs.seconds(1) == 1.0
    for _ in range(StepCosts.STEPS):
        costs.observe(8, 2.0)
    assert costs.largest_step == 40
    assert costs.seconds(1) > 1.0  # on a line through 8


def test_the_acceptance_follows_mistakes_and_right_guesses() -> None:
    acceptance = Acceptance()
    acceptance.observe(1000, wrong=False)
    assert acceptance.probability > 0.97
    for _ in range(12):
        acceptance.observe(0, wrong=True)
    assert acceptance.probability < 0.3
    acceptance.observe(8, wrong=False)
    assert acceptance.probability > 0.7


@pytest.mark.parametrize(("cost", "length"), [(0.0, 16), (0.01, 15), (0.3, 3), (1.0, 0), (2.0, 0)])
def test_the_dearer_the_rows_the_shorter_the_draft(cost: float, length: int) -> None:
    costs = learned({n: 1 + cost * (n - 1) for n in (1, 2, 4, 8, 16, 32)})
    assert share_rows([16], [0.8], costs, 1, 1)[0] == pytest.approx(length, abs=1)


def test_the_time_that_a_drafter_takes_counts() -> None:
    costs = learned({n: 1 + 0.01 * (n - 1) for n in (1, 2, 4, 8, 16, 32)})
    lengths = [share_rows([16], [0.8], costs, 1, 1, step)[0] for step in (0.0, 0.2, 0.5, 1.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[1] > lengths[-1] == 0


def test_a_step_into_the_unknown_is_no_larger_than_what_is_known() -> None:
    costs = learned({1: 1.0})
    assert share_rows([64], [0.999], costs, 1, 1)[0] == 11
    costs.observe(12, 1.01)
    assert share_rows([64], [0.999], costs, 1, 1)[0] == 55


@pytest.mark.parametrize(
    ("row", "right"), [(0.0, 0.95), (0.1, 0.7), (0.3, 0.3), (0.3, 0.95), (0.6, 0.0), (1.0, 0.95)]
)
def test_drafts_never_lose_whatever_rows_cost_and_however_much_is_right(
    row: float, right: float
) -> None:
    """A stream against the same one without drafts, on a machine that is not steady."""
    chance, costs, acceptance = random.Random(1), StepCosts(), Acceptance()
    seconds, n_tokens = 0.0, 0
    while n_tokens < 3000:
        n_draft = share_rows([32], [acceptance.probability], costs, 1, 1)[0]
        n_right = 0
        while n_right < 32 and chance.random() < right:
            n_right += 1
        step = (1 + row * n_draft) * chance.uniform(0.9, 1.1)
        costs.observe(1 + n_draft, step)
        new = min(n_right, n_draft) + 1
        acceptance.observe(min(n_right, new), wrong=n_right < new)
        seconds += step
        n_tokens += new
    rate = n_tokens / seconds
    best = max(sum(right**i for i in range(n + 1)) / (1 + row * n) for n in (0, 1, 2, 4, 8, 16, 32))
    assert rate > 0.97
    assert rate > 0.7 * best


def test_drafts_may_lose_little_before_they_have_won_something() -> None:
    balance = Balance()
    balance.add(0, 1, 5.0)
    assert not balance.is_good
    for _ in range(390):
        balance.forgive()
    assert not balance.is_good
    for _ in range(20):
        balance.forgive()
    assert balance.is_good
    for _ in range(100):
        balance.add(8, 2, 2.0)
    balance.add(0, 1, 21.5)  # what was won long ago does not count
    assert not balance.is_good
