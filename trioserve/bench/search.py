"""Looks for the best flags: one factor at a time, with halved fields and honest noise.

For each factor, such as the number of threads, all options are measured once, in turn with the best
flags so far. The slower half drops out until one option is left. New rounds decide about it, in
which it is measured in turn with the best: it wins if it was faster in each of them, and by more
than the noise, which is how much the best itself differs from round to round. At the end, the
winner is measured in turn with the defaults. Search and decision have separate rounds: the fastest
of several measurements is faster than it would be measured again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import TypeAlias

import attrs
import trio

from trioserve.bench.stats import Spread, spread
from trioserve.errors import TrioServeError

#: Flags of a server, and how fast it is with them: tokens a second of each kind of work.
Flags: TypeAlias = tuple[str, ...]
Speeds: TypeAlias = Mapping[str, float]
Measure: TypeAlias = Callable[[Flags], Awaitable[Speeds]]

#: Rounds that decide, and the least gain that counts, however quiet the machine is.
N_ROUNDS = 3
LEAST_GAIN = 0.02

#: An option this slow is not measured again.
_HOPELESS = 0.9


@attrs.frozen
class Factor:
    """A trial, with its options in addition to the default, such as ``("-fa", "off")``."""

    name: str
    options: tuple[Flags, ...]


@attrs.frozen(kw_only=True)
class Trial:
    """The result of an option, or of the best flags beside the defaults.

    Attributes:
        factor: its name.
        flags: the option.
        gain: its speed over that of the best flags before.
        noise: how much these differed from round to round.
        kinds: the gain of each kind of work.
        outcome: "better", "worse", "no difference", "dropped" as too slow, or an error.
    """

    factor: str
    flags: Flags
    gain: Spread | None = None
    noise: float = 0.0
    kinds: Mapping[str, float] = attrs.field(factory=dict)
    outcome: str


@attrs.frozen(kw_only=True)
class Found:
    """The best flags, none if the defaults are, and their last comparison with the defaults."""

    flags: Flags
    final: Trial | None
    is_complete: bool


def ratio(speeds: Speeds, base: Speeds) -> float:
    """Compare speeds: the geometric mean over all kinds of work."""
    return math.exp(statistics.fmean(math.log(speeds[kind] / base[kind]) for kind in base))


def noise_of(runs: Sequence[Speeds]) -> float:
    """The difference between runs with the same flags, as a share."""
    return max((abs(math.log(ratio(a, b))) for a in runs for b in runs), default=0.0)


def judged(factor: str, flags: Flags, runs: Sequence[Speeds], base: Sequence[Speeds]) -> Trial:
    """Decide about flags that were measured in turn with others."""
    pairs = [*zip(runs, base, strict=True)]
    gain = spread([ratio(ours, theirs) for ours, theirs in pairs])
    assert gain is not None
    noise = noise_of(base)
    outcome = "no difference"
    if gain.low > 1 and gain.median > 1 + max(LEAST_GAIN, noise):
        outcome = "better"
    elif gain.high < 1 and gain.median < 1 - max(LEAST_GAIN, noise):
        outcome = "worse"
    kinds = {kind: statistics.median(a[kind] / b[kind] for a, b in pairs) for kind in base[0]}
    return Trial(factor=factor, flags=flags, gain=gain, noise=noise, kinds=kinds, outcome=outcome)


class Search:
    """A search that ends in time.

    Args:
        measure: measures flags once; what it raises as TrioServeError ends an option.
        told: called with each result.
        seconds: for all factors, without the comparison at the end.
    """

    def __init__(self, measure: Measure, told: Callable[[Trial], None], seconds: float) -> None:
        self._measure_once = measure
        self._told = told
        self._deadline = trio.current_time() + seconds
        self._taken: list[float] = []  # seconds of each measurement, with starts of servers

    async def run(self, factors: Sequence[Factor]) -> Found:
        """Try all factors, as far as the time allows.

        Raises:
            TrioServeError: the best flags can no longer be measured.
        """
        best: Flags = ()
        is_complete = True
        for factor in factors:
            if not self._has_time_for(2 + len(factor.options) + 2 * N_ROUNDS):
                is_complete = False
                break
            option = await self._fastest(factor, best)
            if option is not None:
                trial = await self._compare(factor.name, best, (*best, *option), option)
                self._told(trial)
                if trial.outcome == "better":
                    best = (*best, *option)
        final = await self._compare("all", (), best, best) if best else None
        if final is not None and final.outcome != "better":
            best = ()
        return Found(flags=best, final=final, is_complete=is_complete)

    def _has_time_for(self, n_measurements: int) -> bool:
        each = statistics.fmean(self._taken) if self._taken else 0.0
        return trio.current_time() + n_measurements * each <= self._deadline

    async def _measure(self, flags: Flags) -> Speeds:
        began = trio.current_time()
        speeds = await self._measure_once(flags)
        self._taken.append(trio.current_time() - began)
        return speeds

    async def _fastest(self, factor: Factor, best: Flags) -> Flags | None:
        """Drop the slower half of the options until one is left; None if none has a chance."""
        gains: dict[Flags, list[float]] = {option: [] for option in factor.options}
        while True:
            await self._round(factor, best, gains)
            medians = {option: statistics.median(found) for option, found in gains.items()}
            order = sorted(gains, key=lambda option: medians[option], reverse=True)
            kept = [one for one in order[: max(1, len(order) // 2)] if medians[one] >= _HOPELESS]
            for option in order:
                if option not in kept:
                    gain = spread(gains.pop(option))
                    trial = Trial(factor=factor.name, flags=option, gain=gain, outcome="dropped")
                    self._told(trial)
            if len(kept) <= 1:
                return kept[0] if kept else None

    async def _round(self, factor: Factor, best: Flags, gains: dict[Flags, list[float]]) -> None:
        """Measure each option once, and the best flags before and after; only the slower counts."""
        before = await self._measure(best)
        speeds: dict[Flags, Speeds] = {}
        for option in list(gains):
            try:
                speeds[option] = await self._measure((*best, *option))
            except TrioServeError as error:
                del gains[option]
                self._told(Trial(factor=factor.name, flags=option, outcome=error.message))
        after = await self._measure(best)
        base = after if ratio(after, before) < 1 else before
        for option, found in gains.items():
            found.append(ratio(speeds[option], base))

    async def _compare(self, factor: str, best: Flags, other: Flags, shown: Flags) -> Trial:
        """Measure A B, B A, A B."""
        runs: dict[Flags, list[Speeds]] = {best: [], other: []}
        for number in range(N_ROUNDS):
            for flags in (best, other) if number % 2 == 0 else (other, best):
                runs[flags].append(await self._measure(flags))
        return judged(factor, shown, runs[other], runs[best])
