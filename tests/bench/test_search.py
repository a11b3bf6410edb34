"""The search for the best flags, with measurements by a script."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping

import pytest
import trio

from trioserve.bench.search import Factor, Flags, Found, Search, Speeds, Trial, judged
from trioserve.errors import ModelLoadError

THREADS = Factor("threads", (("-t", "1"), ("-t", "2"), ("-t", "3"), ("-t", "4")))
LAYOUT = Factor("layout", (("-kvu",),))


class Machine:
    """A machine on which each flag has a speed; measurements take a second.

    Args:
        speeds: a factor for each option that is not as fast as the default.
        noise: what each measurement is multiplied with, again and again.
    """

    def __init__(self, speeds: Mapping[Flags, float], *noise: float) -> None:
        self.speeds = speeds
        self.noise = itertools.cycle(noise or (1.0,))
        self.measured: list[Flags] = []

    async def measure(self, flags: Flags) -> Speeds:
        await trio.sleep(1)
        self.measured.append(flags)
        rate = 100.0 * next(self.noise)
        for option, factor in self.speeds.items():
            if option == ("broken",) and "broken" in flags:
                raise ModelLoadError("It does not fit.")
            if any(flags[i : i + len(option)] == option for i in range(len(flags))):
                rate *= factor
        return {"prompt": 10 * rate, "output": rate}


async def search(
    machine: Machine, *factors: Factor, seconds: float = 1000
) -> tuple[Found, list[Trial]]:
    trials: list[Trial] = []
    found = await Search(machine.measure, trials.append, seconds).run(factors)
    return found, trials


async def test_the_best_of_each_factor_is_kept(autojump_clock: trio.testing.MockClock) -> None:
    machine = Machine({("-t", "1"): 0.5, ("-t", "3"): 1.2, ("-t", "4"): 1.1, ("-kvu",): 1.3})
    found, trials = await search(machine, THREADS, LAYOUT)
    assert found.flags == ("-t", "3", "-kvu")
    assert found.is_complete
    assert found.final is not None and found.final.gain is not None
    assert found.final.gain.median == pytest.approx(1.2 * 1.3)
    assert found.final.kinds == pytest.approx({"prompt": 1.56, "output": 1.56})
    outcomes = {trial.flags: trial.outcome for trial in trials}
    assert outcomes == {
        ("-t", "1"): "dropped",
        ("-t", "2"): "dropped",
        ("-t", "4"): "dropped",
        ("-t", "3"): "better",
        ("-kvu",): "better",
    }
    # The next factor is tried beside what has won, and the hopeless option is measured once.
    assert ("-t", "3", "-kvu") in machine.measured and ("-kvu",) not in machine.measured
    assert machine.measured.count(("-t", "1")) == 1


async def test_the_slower_half_drops_out(autojump_clock: trio.testing.MockClock) -> None:
    machine = Machine({("-t", "2"): 1.01, ("-t", "3"): 1.03, ("-t", "4"): 1.05})
    await search(machine, THREADS)
    counts = [machine.measured.count(option) for option in THREADS.options]
    assert counts == [1, 1, 2, 2 + 3 + 3]  # the last one also in the comparison with the defaults


@pytest.mark.parametrize("noise", [(1.0,), (1.0, 1.2, 0.9), (0.8, 1.0, 1.3, 1.1, 0.7)])
async def test_noise_is_no_gain(
    noise: tuple[float, ...], autojump_clock: trio.testing.MockClock
) -> None:
    """All options are as fast as the defaults."""
    found, trials = await search(Machine({}, *noise), THREADS, LAYOUT)
    assert found.flags == ()
    assert "better" not in {trial.outcome for trial in trials}


def test_a_gain_below_the_noise_is_none() -> None:
    def runs(*rates: float) -> list[Speeds]:
        return [{"output": rate} for rate in rates]

    def outcome(ours: list[Speeds], base: list[Speeds]) -> str:
        return judged("f", (), ours, base).outcome

    assert outcome(runs(110, 111, 109), runs(100, 101, 99)) == "better"
    assert outcome(runs(90, 91, 89), runs(100, 101, 99)) == "worse"
    assert outcome(runs(101, 102, 101), runs(100, 101, 100)) == "no difference"  # below 2 %
    assert outcome(runs(110, 130, 95), runs(100, 120, 90)) == "no difference"  # noise of 29 %
    assert outcome(runs(120, 121, 98), runs(100, 101, 99)) == "no difference"  # once slower


async def test_an_option_that_does_not_start_is_left_out(
    autojump_clock: trio.testing.MockClock,
) -> None:
    machine = Machine({("broken",): 1.0, ("-kvu",): 1.5})
    found, trials = await search(machine, Factor("f", (("broken",), ("-kvu",))))
    assert found.flags == ("-kvu",)
    assert trials[0].outcome == "It does not fit."


async def test_a_factor_without_an_option_that_starts(
    autojump_clock: trio.testing.MockClock,
) -> None:
    found, trials = await search(Machine({("broken",): 1.0}), Factor("f", (("broken",),)))
    assert (found.flags, len(trials)) == ((), 1)


async def test_it_ends_in_time(autojump_clock: trio.testing.MockClock) -> None:
    """Each measurement takes a second: there is time for one factor."""
    found, trials = await search(Machine({("-kvu",): 1.5}), LAYOUT, THREADS, seconds=15)
    assert found.flags == ("-kvu",)
    assert not found.is_complete
    assert {trial.factor for trial in trials} == {"layout"}
    assert trio.current_time() < 20


async def test_flags_that_do_not_win_together_are_not_recommended(
    autojump_clock: trio.testing.MockClock,
) -> None:
    class Drifting(Machine):
        async def measure(self, flags: Flags) -> Speeds:
            speeds = await super().measure(flags)
            gone: Callable[[], bool] = lambda: len(self.measured) > 9  # noqa: E731
            return {"output": 100.0} if gone() else speeds

    found, _ = await search(Drifting({("-kvu",): 1.5}), LAYOUT)
    assert found.final is not None and found.final.outcome == "no difference"
    assert found.flags == ()
