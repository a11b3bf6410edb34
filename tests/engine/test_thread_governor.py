"""The number of threads, on machines that are simulated: quiet, busy, and now and then busy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable

import pytest
from hypothesis import given, settings, strategies as st

from trioserve.engine.thread_governor import (
    HEAVY,
    LOST_CORES,
    MAX_PAUSE_S,
    MAX_WAIT_S,
    OVERDUE,
    WINDOW,
    Step,
    ThreadGovernor,
)

#: Seconds between two decodes: sampling, and handing the tokens over.
BETWEEN = 3e-4


class Governors:
    """Those of light and of heavy steps: asks for each step the one that it concerns."""

    def __init__(self, light: range, heavy: range) -> None:
        self.heavy = ThreadGovernor(heavy)
        self.light = ThreadGovernor(light, self.heavy)

    @property
    def threads(self) -> tuple[int, int]:
        return self.light.threads, self.heavy.threads

    @property
    def changes(self) -> int:
        return self.light.changes + self.heavy.changes

    def plan(self, n_tokens: int) -> tuple[int, float | None]:
        return (self.heavy if n_tokens >= HEAVY else self.light).plan(n_tokens)

    def observe(self, step: Step) -> None:
        (self.heavy if step.size >= HEAVY.bit_length() else self.light).observe(step)

    def give_up(self, step: Step) -> None:
        (self.heavy if step.size >= HEAVY.bit_length() else self.light).give_up(step)


class Machine:
    """Cores, other busy processes, and a server that decodes.

    `work` is the CPU time of a step with one token. Threads that have a core each share it. If
    there are too few cores, all threads wait for the one without, for a part of `stall` seconds.
    """

    def __init__(self, cores: int = 2, *, noise: float = 0.1, seed: int = 0) -> None:
        self.cores = cores
        self.others = 0
        self.work = 0.02
        self.stall = 0.06
        self.stalls_heavy = False
        self.hides_cpu = False  # others slow down a core, and take no CPU time of it
        self.now = 1000.0
        self.n_steps = 0
        self.n_given_up = 0
        self.choices = range(1, cores + 1)
        self.governor = Governors(self.choices, self.choices)
        self.random = random.Random(seed)
        self.noise = noise

    @property
    def threads(self) -> int:
        return self.governor.threads[0]

    def cost(self, threads: int, n_tokens: int = 1) -> tuple[float, float]:
        """Return the seconds of a step, and its CPU time."""
        seconds = self.work * (1 + 0.1 * n_tokens) / threads
        seconds *= self.random.uniform(1, 1 + self.noise)
        if threads + self.others <= self.cores:
            return seconds, seconds * threads
        if self.hides_cpu:
            return 2 * seconds, 2 * seconds * threads
        share = self.cores / (threads + self.others)
        seconds /= share
        if (
            n_tokens < HEAVY or self.stalls_heavy
        ):  # of many tokens, there is much to do between two waits
            seconds += self.random.uniform(0.3, 1.7) * self.stall
        return seconds, seconds * threads * share

    def step(self, n_tokens: int = 1) -> float:
        """Run one; returns how long it took."""
        began, limit = self.now, self.governor.plan(n_tokens)[1]
        seconds, cpu_seconds = self._decode(n_tokens)
        while limit is not None and seconds > limit:
            if self.threads_of(n_tokens) - cpu_seconds / seconds > LOST_CORES:
                self.now += limit
                share = limit / seconds
                self.governor.give_up(Step(n_tokens, limit, cpu_seconds * share, self.now))
                self.n_given_up += 1
                seconds, cpu_seconds = self._decode(n_tokens)
                break
            limit *= 3
        self.now += seconds
        self.governor.observe(Step(n_tokens, seconds, cpu_seconds, self.now))
        self.now += BETWEEN
        self.n_steps += 1
        return self.now - BETWEEN - began

    def threads_of(self, n_tokens: int) -> int:
        threads = self.governor.plan(n_tokens)[0]
        assert threads in self.choices
        return threads

    def _decode(self, n_tokens: int) -> tuple[float, float]:
        return self.cost(self.threads_of(n_tokens), n_tokens)

    def run(self, seconds: float, n_tokens: int = 1) -> list[int]:
        """Run for a while; returns the threads of each step."""
        used, end = [], self.now + seconds
        while self.now < end:
            used.append(self.governor.plan(n_tokens)[0])
            self.step(n_tokens)
        return used

    def speed(self, threads: int, n_tokens: int = 1, n: int = 300) -> float:
        """Return the steps a second with a number of threads, as the machine is now."""
        return n / sum(self.cost(threads, n_tokens)[0] + BETWEEN for _ in range(n))


def share(used: Iterable[int], threads: int) -> float:
    used = list(used)
    return used.count(threads) / len(used)


@pytest.mark.parametrize("n_tokens", [1, 100])
def test_a_quiet_machine_is_left_alone(n_tokens: int) -> None:
    machine = Machine(cores=8, noise=0.3)
    assert share(machine.run(600, n_tokens), 8) == 1
    assert machine.governor.changes == 0


def test_the_first_trial_leaves_a_core_to_each_of_the_others() -> None:
    machine = Machine(cores=8, noise=0)
    machine.others = 4
    used = list(dict.fromkeys(machine.run(1)))
    assert used[:2] == [8, 4]


def test_after_each_trial_that_fails_the_next_one_comes_after_twice_the_time() -> None:
    machine = Machine(noise=0)
    machine.others, machine.stall = 1, 0.0
    trials, threads = [], 2
    while len(trials) < 10:
        before, threads = threads, machine.governor.plan(1)[0]
        if threads < before:
            trials.append(machine.now)
        machine.step()
    gaps = [after - before for before, after in itertools.pairwise(trials)]
    for gap, wait in zip(gaps, (0.5, 1, 2, 4, 8, 16, 32, 60, 60), strict=True):
        assert wait < gap < 1.1 * wait + 0.3


@pytest.mark.parametrize("lost", [0.0, 0.5])
def test_fewer_threads_are_tried_again_once_steps_have_lasted_for_so_long(lost: float) -> None:
    """After a trial that has failed, as soon as there were half a second of steps."""
    governor = Governors(range(1, 3), range(1, 3))
    now = 0.0

    def step(n: int, seconds: float, lost: float) -> None:
        nonlocal now
        for _ in range(n):
            now += seconds
            governor.observe(Step(1, seconds, seconds * (2 - lost), now))

    step(WINDOW, 1 / 32, 1.0)
    assert governor.plan(1)[0] == 1
    step(1, 1 / 16, 1.0)
    step(2 * WINDOW - 1, 1 / 32, lost)
    assert (governor.plan(1)[0], governor.plan(1)[1]) == (2, None)
    step(1, 1 / 32, lost)
    assert (governor.plan(1)[0], governor.plan(1)[1]) == (1 if lost else 2, OVERDUE / 32)


def test_steps_of_many_tokens_follow_and_do_not_try_more_threads_at_once() -> None:
    machine = Machine(noise=0)
    machine.others = 1
    while machine.threads == 2:
        machine.step()
    assert machine.governor.threads == (1, 1)
    assert machine.run(1.1, 100)[:5] == [1, 1, 1, 1, 2]


def test_a_core_that_is_shared_by_hardware_threads() -> None:
    """No process takes CPU time, but a core is slow."""
    machine = Machine(cores=4)
    machine.hides_cpu = True
    machine.run(5)
    machine.others = 1
    machine.run(10)
    assert machine.threads == 3
    machine.others = 0
    machine.run(30)
    assert machine.threads == 4


def test_a_trial_that_is_far_worse_ends_at_once() -> None:
    machine = Machine()
    used = []
    for _ in range(40):
        threads = machine.governor.plan(100)[0]
        used.append(threads)
        machine.now += 0.1 if threads == 2 else 0.2  # half a core is lost, so fewer are tried
        machine.governor.observe(Step(100, 0.4 / threads / 2, 0.15, machine.now))
    assert 1 in used
    assert (1, 1) not in itertools.pairwise(used)


def test_measurements_before_a_pause_do_not_count() -> None:
    machine = Machine()
    machine.run(1)
    machine.others = 1
    while machine.governor.plan(1)[0] == 2:
        machine.step()
    machine.step()  # of a trial with one thread
    machine.others = 0
    machine.now += 2 * MAX_PAUSE_S
    machine.step()
    assert share(machine.run(10), 2) == 1
    machine.now += 2 * MAX_PAUSE_S
    for _ in range(10 * WINDOW):  # steps so rare that there is no window
        machine.others = 1
        machine.now += 2 * MAX_PAUSE_S
        machine.step()
    assert machine.threads == 2
    assert machine.governor.changes == 0


@pytest.mark.parametrize("n_tokens", [1, 100])
def test_no_step_takes_far_too_long(n_tokens: int) -> None:
    machine = Machine()
    machine.run(30, n_tokens)
    usual = machine.step(n_tokens)
    machine.others, machine.stall, machine.stalls_heavy = 1, 100 * usual, True
    worst = max(machine.step(n_tokens) for _ in range(300))
    assert 0 < machine.n_given_up < 10
    assert worst < 10 * usual
    assert machine.governor.threads[n_tokens >= HEAVY] == 1


def test_a_step_that_has_its_cores_may_take_its_time() -> None:
    machine = Machine()
    machine.run(30)
    machine.work *= 20  # a much longer text
    machine.run(30)
    assert machine.n_given_up == 0


def test_steps_are_seldom_given_up_if_fewer_threads_do_not_help() -> None:
    machine = Machine()
    machine.run(30)
    machine.others, machine.cores, machine.stall = 100, 1, 0.0
    machine.run(600)
    assert machine.n_given_up < 50
    assert machine.n_steps > 200


def test_a_trial_waits_for_steps_of_its_size() -> None:
    machine = Machine()
    machine.run(1)
    machine.others = 1
    while machine.governor.plan(1)[0] == 2:
        machine.step()
    assert machine.governor.plan(4)[0] == 2
    while machine.threads == 2:
        machine.step(1)
        assert machine.governor.plan(4)[0] == machine.threads
        machine.step(4)


def test_a_fixed_number_stays() -> None:
    governor = Governors(range(3, 4), range(5, 6))
    assert (governor.plan(1)[0], governor.plan(HEAVY)[0]) == governor.threads == (3, 5)
    machine = Machine(cores=8)
    machine.governor = Governors(range(1, 9), range(5, 6))
    machine.others = 7
    machine.run(30, 1)
    assert share(machine.run(30, HEAVY), 5) == 1
    assert machine.governor.threads == (1, 5)


@settings(max_examples=12, deadline=None)
@given(
    cores=st.integers(2, 6),
    seed=st.integers(0, 2**16),
    phases=st.lists(
        st.tuples(st.integers(0, 5), st.floats(0.2, 60), st.sampled_from([1, 3, 8])), max_size=6
    ),
)
def test_it_follows_the_machine_and_does_not_flap(
    cores: int, seed: int, phases: list[tuple[int, float, int]]
) -> None:
    machine = Machine(cores, seed=seed)
    machine.run(5)
    for others, seconds, n_tokens in phases:
        machine.others = min(others, cores - 1)
        machine.run(seconds, n_tokens)
    # It settles on the best number, in a time that is bounded whatever was before...
    machine.run(2 * MAX_WAIT_S + 15)
    best = max(machine.choices, key=machine.speed)
    assert machine.threads == best
    # ...is as fast as that is, and stays there.
    changes, n_steps = machine.governor.changes, machine.n_steps
    machine.run(120)
    assert machine.governor.changes == changes
    assert (machine.n_steps - n_steps) / 120 > 0.95 * machine.speed(best)
    assert changes <= (len(phases) + 1) * 2 * cores


@settings(max_examples=10, deadline=None)
@given(st.floats(0.05, 20), st.floats(0.05, 20), st.integers(0, 2**16))
def test_a_neighbour_that_comes_and_goes_all_the_time(busy: float, quiet: float, seed: int) -> None:
    """It changes rarely, and is no worse than with the fewer threads all the time."""
    machine = Machine(seed=seed)
    start = machine.now
    expected = {1: 0.0, 2: 0.0}
    for _ in range(int(100 / (busy + quiet)) + 1):
        for machine.others, seconds in ((1, busy), (0, quiet)):
            began = machine.now
            machine.run(seconds)
            for threads in expected:
                expected[threads] += machine.speed(threads, n=20) * (machine.now - began)
    assert machine.n_steps > 0.9 * expected[1]
    assert machine.n_steps > 0.65 * expected[2]
    assert machine.governor.changes < (machine.now - start) / 2
