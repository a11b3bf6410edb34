"""A decode that is ended because it takes too long. The threads are real, and wait for events."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator

import pytest

from trioserve.engine import decoder as threads_module
from trioserve.engine.decoder import Threads, Watchdog
from trioserve.engine.thread_governor import HEAVY, WINDOW
from trioserve.errors import DecodeInterruptedError

SOON = 0.001
NEVER = 1000.0


class Decode:
    """A decode that runs until it is interrupted."""

    def __init__(self) -> None:
        self.interrupted = threading.Event()
        self.n_interrupts = 0

    def interrupt(self) -> None:
        self.n_interrupts += 1
        self.interrupted.set()

    def forget(self) -> None:
        """Forget interrupts that came too late, from a watchdog that saw a pause of the machine."""
        self.n_interrupts = 0
        self.interrupted.clear()

    def __call__(self) -> None:
        assert self.interrupted.wait(10)
        raise DecodeInterruptedError("interrupted")


@pytest.fixture
def decode() -> Decode:
    return Decode()


@pytest.fixture
def watchdog(decode: Decode) -> Iterator[Watchdog]:
    before = threading.enumerate()
    watchdog = Watchdog(decode.interrupt)
    watchdog.start()
    yield watchdog
    watchdog.close()
    assert threading.enumerate() == before


def test_an_overdue_decode_is_interrupted(watchdog: Watchdog, decode: Decode) -> None:
    for n in range(1, 4):
        watch = watchdog.begin(SOON, lambda: True)
        assert decode.interrupted.wait(10)
        watchdog.end()
        assert watch.has_ended
        assert decode.n_interrupts == n
        decode.interrupted.clear()


def test_a_decode_that_is_not_hopeless_is_checked_again_later(
    watchdog: Watchdog, decode: Decode
) -> None:
    answers, ends = iter([False, False, True]), []

    def is_hopeless() -> bool:
        assert watchdog._watch is not None
        ends.append(watchdog._watch.end)
        return next(answers)

    watch = watchdog.begin(SOON, is_hopeless)
    assert decode.interrupted.wait(10)
    watchdog.end()
    assert watch.has_ended
    pauses = [after - before for before, after in itertools.pairwise(ends)]
    assert pauses == pytest.approx([2 * SOON, 4 * SOON])
    assert decode.n_interrupts == 1


def test_a_decode_that_ends_by_itself_is_not_interrupted(
    watchdog: Watchdog, decode: Decode
) -> None:
    long = watchdog.begin(NEVER, lambda: True)
    watchdog.end()
    short = watchdog.begin(SOON, lambda: True)
    assert decode.interrupted.wait(10)
    watchdog.end()
    assert (long.has_ended, short.has_ended, decode.n_interrupts) == (False, True, 1)


class Machine:
    """Computes at once, until other processes come; then only one thread comes to an end."""

    def __init__(self, decode: Decode, monkeypatch: pytest.MonkeyPatch) -> None:
        self.thread_choices = (range(1, 3), range(1, 3))
        self.threads: list[int] = []
        self.computed: list[int] = []
        self.is_busy = False
        self.now = 0.0
        self._decode = decode
        monkeypatch.setattr(threads_module, "monotonic", self._monotonic)
        monkeypatch.setattr(threads_module, "process_time", self._process_time)

    def set_threads(self, count: int) -> None:
        self.threads.append(count)

    def compute(self) -> None:
        self.now += 0.001
        if self.is_busy and self.threads[-1] == 2:
            self._decode()
        self.computed.append(self.threads[-1])

    def _monotonic(self) -> float:
        self.now += 0.0001
        return self.now

    def _process_time(self) -> float:
        return 0.0 if self.is_busy else 2 * self.now


@pytest.fixture
def machine(decode: Decode, monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(decode, monkeypatch)


@pytest.mark.parametrize("n_tokens", [1, HEAVY])
def test_a_step_is_computed_again_with_fewer_threads(
    machine: Machine, decode: Decode, n_tokens: int
) -> None:
    threads = Threads(machine, decode.interrupt)
    threads.start()
    for _ in range(WINDOW + 1):
        threads.run(n_tokens, machine.compute)
    decode.forget()
    machine.is_busy = True
    threads.run(n_tokens, machine.compute)
    assert machine.computed == [2] * (WINDOW + 1) + [1]
    assert decode.n_interrupts == 1
    threads.close()


@pytest.mark.parametrize("interrupt", [None, lambda: None])
def test_an_interruption_by_others_is_theirs(
    machine: Machine, interrupt: Callable[[], None] | None
) -> None:
    def compute() -> None:
        raise DecodeInterruptedError("cancelled")

    threads = Threads(machine, interrupt)
    for _ in range(WINDOW + 1):
        threads.run(1, machine.compute)
    with pytest.raises(DecodeInterruptedError):
        threads.run(1, compute)
    threads.close()
