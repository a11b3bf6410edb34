"""What prompt tokens are taken to cost."""

from __future__ import annotations

import pytest

from trioserve.engine.strategy import TILE, PrefillCosts


def observe(costs: PrefillCosts, n_prefill: int, seconds: float, n_decode: int = 4) -> None:
    costs.observe(n_prefill, n_decode, seconds, quiet=False)


def test_nothing_fits_into_no_time_nor_while_nothing_is_known() -> None:
    costs = PrefillCosts()
    assert (costs.fitting(1.0), costs.fitting_alone(1.0)) == (0, 0)
    observe(costs, 100, 0.1)
    assert (costs.fitting(0.0), costs.fitting(-1.0)) == (0, 0)


def test_steps_smaller_and_larger_than_a_tile_are_told_apart() -> None:
    costs = PrefillCosts()
    observe(costs, 0, 0.010)
    observe(costs, 20, 0.050)  # 2 ms a token
    assert costs.tile_pays(60, 0.5) and not costs.knows_tiles
    observe(costs, 100, 0.110)  # 1 ms
    assert costs.tile_pays(60, 0.05) and costs.knows_tiles
    assert costs.fitting(0.0405) == 20
    assert costs.fitting(0.1005) == 100
    assert costs.fitting(0.0635) == 31, "not a tile, so it costs what small steps do"
    assert costs.large_seconds(100) == pytest.approx(0.1 * costs.DEEPER)


def test_a_tile_that_is_hardly_cheaper_does_not_pay() -> None:
    costs = PrefillCosts()
    observe(costs, 20, 0.020)
    observe(costs, 100, 0.090)
    assert not costs.tile_pays(60, 0.050)
    assert costs.tile_pays(60, 0.070), "it is hidden from readers"


def test_what_others_have_made_dear_is_tried_again() -> None:
    costs = PrefillCosts()
    observe(costs, 20, 0.020)
    for _ in range(9):
        observe(costs, 100, 0.300)
    for _ in range(costs.RETRY):
        assert not costs.tile_pays(60, 0.200)
        observe(costs, 20, 0.020)
    assert costs.tile_pays(60, 0.200)
    assert not costs.tile_pays(60, 0.090), "too long"
    observe(costs, 100, 0.100)
    assert costs.large_seconds(1) < 0.002 * costs.DEEPER


def test_one_step_that_others_have_held_up_says_little() -> None:
    costs = PrefillCosts()
    observe(costs, 100, 0.1)
    observe(costs, 100, 100.0)
    assert costs.large_seconds(100) <= 0.2 * costs.DEEPER


def test_a_step_with_few_prompt_tokens_says_nothing() -> None:
    costs = PrefillCosts()
    observe(costs, 100, 0.1)
    observe(costs, 15, 15.0)
    assert costs.fitting(0.1005) == 100


def test_only_steps_without_decode_tell_what_prompts_cost_alone() -> None:
    costs = PrefillCosts()
    observe(costs, 100, 0.2)
    assert costs.fitting_alone(1.0) == 0
    observe(costs, 100, 0.1, n_decode=0)
    assert costs.fitting_alone(1.0005) == 1000


def test_decode_is_quiet_only_while_no_prompts_come_in() -> None:
    costs = PrefillCosts()
    costs.observe(0, 4, 0.010, quiet=True)
    costs.observe(0, 4, 0.020, quiet=False)
    assert costs.quiet_s == 0.010
    assert costs.decode_s == pytest.approx(0.013)


@pytest.mark.parametrize(("small", "left"), [(False, 10), (True, 0)])
def test_what_was_dear_deep_in_a_prompt_is_forgotten(small: bool, left: int) -> None:
    costs = PrefillCosts()
    observe(costs, 20, 0.020)
    observe(costs, 100, 0.1)
    costs.forget_depth(TILE * 0.00101, small=small)
    assert costs.knows_tiles, "a tile fits"
    costs.forget_depth(TILE * 0.00099, small=small)
    assert not costs.knows_tiles
    assert costs.fitting(0.0105) == left
