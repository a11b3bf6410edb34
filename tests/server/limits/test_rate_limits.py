"""Token buckets: what a client may take in a minute, and what it gets back."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from trioserve.errors import RateLimitError
from trioserve.server.limits.rates import PERIOD, RateLimits


class Clock:
    """Time that a test moves."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def limits_of(requests: int = 0, tokens: int = 0) -> tuple[RateLimits, Clock]:
    clock = Clock()
    return RateLimits(requests, tokens, clock=clock), clock


def test_requests_come_back_at_a_steady_rate() -> None:
    limits, clock = limits_of(requests=6)
    for _ in range(6):
        limits.admit("a")
    with pytest.raises(RateLimitError, match="6 requests a minute") as refusal:
        limits.admit("a")
    assert refusal.value.retry_after == pytest.approx(10)
    limits.admit("b")  # another client has its own
    clock.now += 10
    limits.admit("a")
    assert limits.remaining("a")["requests"].remaining == 0
    assert limits.remaining("a")["requests"].reset == pytest.approx(60)


def test_tokens_that_were_not_used_are_given_back() -> None:
    limits, _ = limits_of(tokens=100)
    settle = limits.reserve("a", 80)
    with pytest.raises(RateLimitError, match="100 tokens a minute") as refusal:
        limits.reserve("a", 30)
    assert refusal.value.retry_after == pytest.approx(6)
    settle(10)
    assert limits.remaining("a")["tokens"].remaining == 90
    limits.reserve("a", 90)


def test_a_request_for_more_than_a_minute_brings_needs_a_full_bucket() -> None:
    limits, clock = limits_of(tokens=100)
    settle = limits.reserve("a", 1000)
    clock.now += 6
    settle(150)  # 50 more than were taken are owed
    assert limits.remaining("a")["tokens"].remaining == 0
    with pytest.raises(RateLimitError) as refusal:
        limits.reserve("a", 1000)
    clock.now += refusal.value.retry_after
    limits.reserve("a", 1000)


def test_a_refusal_takes_nothing() -> None:
    limits, _ = limits_of(tokens=10)
    limits.reserve("a", 6)
    with pytest.raises(RateLimitError):
        limits.reserve("a", 5)
    assert limits.remaining("a")["tokens"].remaining == 4


def test_without_limits_nothing_is_kept() -> None:
    limits, _ = limits_of()
    limits.admit("a")
    limits.reserve("a", 10**9)(5)
    assert (limits.remaining("a"), len(limits)) == ({}, 0)


def test_idle_clients_are_forgotten() -> None:
    limits, clock = limits_of(requests=1)
    for n in range(1000):
        limits.admit(str(n))
        clock.now += 1
    assert len(limits) <= PERIOD + 2


@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.integers(0, 60), st.floats(0, 1)), min_size=1, max_size=60
    )
)
def test_no_minute_brings_more_than_the_limits(steps: list[tuple[float, int, float]]) -> None:
    limits, clock = limits_of(requests=10, tokens=100)
    began, n_requests, n_tokens = clock.now, 0, 0
    for wait, n, share in steps:
        clock.now += wait
        if limits.remaining("a")["requests"].remaining:
            limits.admit("a")
            n_requests += 1
        if limits.remaining("a")["tokens"].remaining >= n:
            settle = limits.reserve("a", n)
            settle(used := int(n * share))
            n_tokens += used
        allowed = 1 + (clock.now - began) / PERIOD
        assert n_requests <= 10 * allowed + 1e-6
        assert n_tokens <= 100 * allowed + 1e-6
