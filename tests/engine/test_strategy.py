"""Strategies: the shares of prompts, and how a strategy is loaded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, strategies as st

from trioserve.engine.strategy import (
    STRATEGIES,
    BatchStrategy,
    DecodeMaximal,
    load_strategy,
    share_out,
)
from trioserve.errors import ConfigError


@pytest.mark.parametrize("name", STRATEGIES)
@given(
    unified=st.booleans(),
    pending=st.lists(st.integers(1, 5000), min_size=1, max_size=8),
    n_decode=st.integers(0, 8),
    budget=st.integers(1, 2048),
    observed=st.lists(
        st.tuples(st.integers(0, 2048), st.integers(0, 8), st.floats(1e-6, 10)), max_size=5
    ),
)
def test_the_shares_are_sound(
    name: str,
    unified: bool,
    pending: list[int],
    n_decode: int,
    budget: int,
    observed: list[tuple[int, int, float]],
) -> None:
    strategy = STRATEGIES[name](50.0)
    strategy.begin(unified=unified)
    for observation in observed:
        strategy.observe(*observation)
    shares = strategy.share(pending, n_decode, budget)
    assert len(shares) == len(pending)
    assert all(0 <= share <= needed for share, needed in zip(shares, pending, strict=True))
    assert (0 if n_decode else 1) <= sum(shares) <= budget
    assert strategy.pace >= 0


def test_a_step_is_filled_up_to_its_time() -> None:
    strategy = DecodeMaximal(50.0)
    strategy.observe(0, 4, 0.010)  # 10 ms to decode
    strategy.observe(100, 0, 0.100)  # 1 ms a prompt token
    assert strategy.share([40], 4, 2048) == [40]
    assert strategy.share([128], 4, 2048) == [60]  # a tile
    assert strategy.share([3000], 0, 2048) == [500]


def test_the_oldest_prompt_is_not_starved_and_the_shortest_not_held_up() -> None:
    assert DecodeMaximal().share([3000, 500, 20], 0, 100) == [50, 30, 20]
    assert DecodeMaximal().share([3000, 20, 500], 0, 1000) == [64, 20, 44]


@pytest.mark.parametrize(
    ("pending", "shares"),
    [
        ([300, 300, 300, 300], [62, 62, 62, 62]),  # in equal parts
        ([300, 10, 300, 300], [80, 10, 80, 80]),
        ([120, 120, 120], [120, 120, 120]),  # half as long again, and none is left
        ([200, 200], [125, 125]),
        ([3000, 500], [125, 125]),  # not in one batch: the oldest has half
        ([3000, 20], [230, 20]),
    ],
)
def test_prompts_that_fit_into_one_batch_are_computed_together(
    pending: list[int], shares: list[int]
) -> None:
    strategy = DecodeMaximal()
    strategy.observe(100, 0, 0.200)  # 250 tokens in half a second
    assert strategy.share(pending, 0, 2048) == shares


def test_more_prompts_than_streams_are_finished_in_one_step() -> None:
    strategy = DecodeMaximal()
    strategy.observe(0, 1, 0.010)
    strategy.observe(100, 0, 0.200)  # 250 tokens in half a second
    assert strategy.share([50] * 7, 1, 2048) == [50] * 7
    assert sum(strategy.share([60] * 7, 1, 2048)) < 420
    assert sum(strategy.share([50] * 7, 7, 2048)) < 350


def test_in_a_split_cache_tiles_are_not_divided_between_prompts() -> None:
    strategy = DecodeMaximal(100.0)
    strategy.begin(unified=False)
    strategy.observe(0, 4, 0.010)
    strategy.observe(100, 0, 0.100)
    shares = []
    while len(shares) < 2:
        if any(share := strategy.share([3000, 2000, 20], 4, 2048)):
            shares.append(share)
        strategy.observe(0, 4, 0.010)
    assert shares == [[257, 0, 0], [0, 237, 20]]


def test_strategies_are_found_by_name_and_by_import_path() -> None:
    assert isinstance(load_strategy("decode-maximal", 50.0), DecodeMaximal)
    path = "trioserve.engine.strategy:DecodeMaximal"
    assert isinstance(load_strategy(path, 50.0), DecodeMaximal)
    for name in ("magic", "no_such_module:Class", "trioserve.engine:NoSuchClass"):
        with pytest.raises(ConfigError, match=name):
            load_strategy(name, 50.0)


class Lacking:
    """Has one of the methods."""

    def __init__(self, max_tick_ms: float) -> None:
        pass

    def share(self, pending: Sequence[int], n_decode: int, budget: int) -> Sequence[int]:
        return share_out(pending, budget)


class Derived(BatchStrategy):
    """Has all methods, but one of them does nothing."""

    def __init__(self, max_tick_ms: float) -> None:
        pass


class Complete(Lacking, BatchStrategy):
    """Has the others by default."""


class Unlimited(BatchStrategy):
    """Takes no limit."""


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("Lacking", "lacks pace and begin and observe. A class derived from .*BatchStrategy has"),
        ("Derived", r"lacks share\."),
        ("Unlimited", "cannot be made: .*takes no arguments|cannot be made: .*argument"),
    ],
)
def test_a_strategy_that_cannot_be_used_says_why(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}' {problem}"):
        load_strategy(f"{__name__}:{name}", 50.0)


def test_a_strategy_may_leave_methods_to_the_protocol() -> None:
    strategy = load_strategy(f"{__name__}:Complete", 50.0)
    strategy.begin(unified=True)
    assert strategy.share([3], 0, 2) == [2]
    strategy.observe(2, 0, 0.1)
    assert strategy.pace == 0.0
