"""The number of prompt tokens in a step beside streams."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from trioserve.engine.strategy import SLOWDOWN, TILE, PacedStrategy, PrefillCosts


def test_prompts_get_a_tile_where_that_is_cheaper_a_token() -> None:
    clock = PacedStrategy(50.0)
    clock.observe(0, 4, 0.020)
    clock.observe(16, 4, 0.180)  # 10 ms a token more: deep in a prompt
    assert clock.prompt_tokens([128], 4, 20) == 20
    assert clock.prompt_tokens([128], 4, 2048) == 60  # a tile, to see what it costs
    clock.observe(60, 4, 0.080)  # 1 ms
    assert clock.prompt_tokens([128], 4, 2048) == 0
    clock.observe(0, 4, 0.020)
    assert clock.prompt_tokens([128], 4, 2048) == 60


def next_part(clock: PacedStrategy, n_pending: int, n_decode: int = 4) -> int:
    """Let the streams decode, 10 ms at a time, until a prompt gets tokens."""
    while not (n_tokens := clock.prompt_tokens([n_pending], n_decode, 2048)):
        clock.observe(0, n_decode, 0.010)
    return n_tokens


def test_prompts_get_no_tile_where_that_only_makes_the_step_longer() -> None:
    clock = PacedStrategy(50.0)
    clock.observe(0, 4, 0.010)
    assert next_part(clock, 3000) == 60
    clock.observe(60, 4, 1.150)  # 19 ms a token: too long to be hidden from readers
    for _ in range(PrefillCosts.RETRY):
        assert next_part(clock, 3000) == 16
        clock.observe(16, 4, 0.330)  # 20 ms
    assert next_part(clock, 3000) == 60, "others may have made the last one dear"


def test_after_a_long_step_streams_catch_up() -> None:
    clock = PacedStrategy(50.0)
    clock.observe(0, 4, 0.010)
    shares = []
    for seconds in (0.170, 0.010, 0.010, 0.010, 0.050):
        shares.append(clock.prompt_tokens([128], 4, 2048))
        assert clock.pace == pytest.approx(0.05)
        clock.observe(shares[-1], 4, seconds)
    assert shares[0] and not any(shares[1:4]) and shares[4]  # five tokens in 250 ms
    clock.observe(0, 4, 0.010)
    assert clock.pace == 0.0, "no more prompts"


def test_a_long_prompt_gets_a_large_tile_once_streams_are_far_enough_ahead() -> None:
    clock = PacedStrategy(50.0)
    clock.observe(0, 4, 0.010)
    clock.prompt_tokens([3000], 4, 2048)
    clock.observe(60, 4, 0.070)  # 1 ms a token
    n_waits, ahead = 0, -0.020
    while not (n_tokens := clock.prompt_tokens([3000], 4, 2048)):
        clock.observe(0, 4, 0.010)
        n_waits, ahead = n_waits + 1, ahead + 0.040
    assert n_tokens == 252 and n_waits == 7
    assert ahead + 0.050 >= 0.010 + 0.252 * PrefillCosts.DEEPER
    assert clock.prompt_tokens([252 + 63], 4, 2048) == 0, "not enough for the rest of it, too"
    parts = []
    for _ in range(8):
        parts.append(next_part(clock, 3000))
        clock.observe(parts[-1], 4, 0.010 + parts[-1] * 0.008)  # ever dearer
    assert sorted(set(parts), reverse=True) == [252, 124, 60], "so that it does not take too long"


def test_in_a_split_cache_one_row_of_each_sequence_is_computed_apart() -> None:
    clock = PacedStrategy(50.0)
    clock.begin(unified=False)
    clock.observe(0, 4, 0.010)
    assert clock.prompt_tokens([3000], 4, 2048) == TILE + 1
    clock.observe(TILE + 1, 4, 0.075)
    assert next_part(clock, 3000) == clock.LARGE_TILES[0] + 1


@pytest.mark.parametrize(("n_decode", "n_tokens"), [(4, 60), (60, 68), (64, 64), (300, 20)])
def test_tiles_are_whole_however_many_streams_there_are(n_decode: int, n_tokens: int) -> None:
    clock = PacedStrategy(50.0)
    clock.observe(0, n_decode, 0.010)
    assert clock.prompt_tokens([3000], n_decode, 2048) == n_tokens


def test_the_pace_follows_the_streams() -> None:
    clock = PacedStrategy(0.0)
    assert clock.prompt_tokens([3000], 4, 2048) and clock.pace == clock.DEFAULT_PACE_S
    for decode_s in (0.010, 0.200):
        for _ in range(30):
            clock.observe(0, 4, decode_s)
        clock.prompt_tokens([3000], 4, 2048)
        assert clock.pace == pytest.approx(SLOWDOWN * decode_s, rel=0.01)


@given(
    decode_s=st.floats(0.001, 0.5),
    token_s=st.floats(0.0001, 0.05),
    tile_gain=st.floats(0.2, 1.0),
    n_decode=st.integers(1, 8),
)
def test_streams_keep_their_pace_and_prompts_come_to_an_end(
    decode_s: float, token_s: float, tile_gain: float, n_decode: int
) -> None:
    clock = PacedStrategy(0.0)
    for _ in range(3):
        clock.observe(0, n_decode, decode_s)
    left, n_steps, seconds, longest = 2000, 0, 0.0, 0.0
    while left:
        n = min(left, clock.prompt_tokens([left], n_decode, 512))
        gain = tile_gain if n + n_decode >= TILE else 1.0
        step = decode_s + n * token_s * gain
        longest = max(longest, step)
        clock.observe(n, n_decode, step)
        left, n_steps, seconds = left - n, n_steps + 1, seconds + step
        assert n_steps < 100_000
    # Unless a step had the fewest tokens that it may have, and took longer than ten tokens do.
    if longest < clock.ALONE * SLOWDOWN * decode_s:
        assert seconds <= n_steps * SLOWDOWN * decode_s + longest


def test_a_step_is_longer_where_more_wait_for_their_first_token_than_for_their_next() -> None:
    clock = PacedStrategy(50.0)
    clock.observe(0, 1, 0.010)
    clock.observe(100, 0, 0.100)  # 1 ms a token
    shares = [clock.prompt_tokens([900] * n, 1, 2048) for n in (7, 20)]
    assert shares == [340, 490]
    assert clock.prompt_tokens([32] * 4, 4, 2048) == 60


def test_the_rest_of_a_long_prompt_waits_for_streams_to_be_ahead_as_well() -> None:
    clock = PacedStrategy(50.0)
    clock.observe(0, 4, 0.010)
    assert next_part(clock, 500) == 60
    clock.observe(60, 4, 0.070)
    assert next_part(clock, 350) == 252
    clock.observe(252, 4, 0.514)  # 2 ms a token, and streams are behind
    n_waits = 0
    while not clock.prompt_tokens([98], 4, 2048):
        clock.observe(0, 4, 0.010)
        n_waits += 1
    assert n_waits == 10, "after 6 they have what they missed, and after 4 more the rest is no gap"
