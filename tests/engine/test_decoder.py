"""A decode that is ended early, because its prompt was cancelled."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from tests.support.engine_harness import Harness
from trioserve.engine.decoder import MIN_INTERRUPTED
from trioserve.testing import ScriptedBackend

LONG = "x" * 400


class Canceller:
    """Cancels tasks from the middle of a decode, as the event loop does."""

    def __init__(self, harness: Harness) -> None:
        self.harness = harness
        self.due: list[int] = []
        harness.backend.on_decode = self

    def __call__(self, backend: ScriptedBackend) -> None:
        for task_id in self.due:
            self.harness.engine.cancel(task_id)
        self.due.clear()


def harness_with(n_slots: int = 2, n_batch: int = 256) -> tuple[Harness, Canceller]:
    harness = Harness(ScriptedBackend(n_slots=n_slots, n_batch=n_batch), max_tick_ms=1e6)
    for task_id in (100, 101):  # from which the strategy learns that tokens are cheap
        harness.submit(task_id, "y" * 300, cache_prompt=False)
    harness.run()
    harness.backend.n_decoded = harness.backend.n_decodes = 0
    return harness, Canceller(harness)


def test_a_prompt_that_is_cancelled_ends_its_decode() -> None:
    harness, canceller = harness_with()
    harness.submit(1, LONG)
    canceller.due = [1]
    harness.step()
    assert harness.backend.n_decoded == 0
    assert not harness.step()
    assert harness.states() == ["idle", "idle"]
    assert harness.backend.n_decodes == 1
    harness.complete(2, "two")
    assert harness.text(2) == "TWO"


def test_a_cancel_between_the_inbox_and_the_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    harness, _ = harness_with()
    strategy = harness.engine._planner._strategy
    share = strategy.share

    def cancel_and_share(*args: Any) -> Sequence[int]:
        """Cancel after the step has taken its commands, and before it has a batch."""
        harness.engine.cancel(1)
        return share(*args)

    monkeypatch.setattr(strategy, "share", cancel_and_share)
    harness.submit(1, LONG)
    harness.step()
    assert harness.backend.n_decoded == 0
    assert not harness.step()
    assert harness.states() == ["idle", "idle"]
    monkeypatch.undo()
    harness.complete(2, "two")
    assert harness.text(2) == "TWO"


@pytest.mark.parametrize("n_tokens", [MIN_INTERRUPTED, len(LONG)])
def test_a_prompt_that_others_decode_beside(n_tokens: int) -> None:
    harness, canceller = harness_with()
    harness.submit(1, "one", max_tokens=4)
    harness.step()
    harness.submit(2, LONG[:n_tokens])
    canceller.due = [2]
    n_decoded = harness.backend.n_decoded
    harness.step()
    assert harness.backend.n_decoded == n_decoded
    harness.run()
    assert harness.text(1) == "ONE"
    assert harness.backend.n_decoded < n_decoded + MIN_INTERRUPTED
    assert harness.states() == ["idle", "idle"]


@pytest.mark.parametrize("cancelled", [1, 3])
def test_a_cancel_of_a_smaller_part_interrupts_nothing(cancelled: int) -> None:
    harness, canceller = harness_with(n_slots=3)
    harness.submit(1, "one", max_tokens=4)
    harness.step()
    harness.submit(2, LONG)
    canceller.due = [cancelled]  # a stream, and an unknown task
    harness.step()
    assert harness.backend.n_decoded > 3 + MIN_INTERRUPTED
    harness.run()
    assert harness.text(2) == LONG.upper()


@pytest.mark.parametrize(
    ("n_tokens", "n_decoded"),
    [(MIN_INTERRUPTED - 1, MIN_INTERRUPTED - 1), (MIN_INTERRUPTED + 1, 0)],
)
def test_a_short_prompt_ends_soon_by_itself(n_tokens: int, n_decoded: int) -> None:
    harness, canceller = harness_with()
    harness.submit(1, "x" * n_tokens)
    canceller.due = [1]
    harness.step()
    assert harness.backend.n_decoded == n_decoded


def test_others_lose_no_two_decodes_in_a_row() -> None:
    harness, canceller = harness_with(n_slots=4)
    harness.submit(1, "o" * 40, max_tokens=40)
    harness.step()
    lost = []
    for task_id in range(2, 12):
        harness.submit(task_id, LONG)
        canceller.due = [task_id]
        before = harness.backend.n_decoded
        harness.step()
        lost.append(harness.backend.n_decoded == before)
    assert True in lost
    assert (True, True) not in set(itertools.pairwise(lost))
    harness.run()
    assert harness.text(1) == "O" * 40


def test_the_threads_are_those_for_the_tokens_of_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(ScriptedBackend(n_slots=2))
    told: list[int] = []

    def run(n_tokens: int, compute: Callable[[], None]) -> None:
        assert n_tokens == len(harness.backend.batch.rows)
        told.append(n_tokens)
        compute()

    monkeypatch.setattr(harness.engine._decoder.threads, "run", run)
    harness.submit(1, "hello world")
    harness.step()
    scheduler = harness.engine._scheduler
    scheduler.propose([(scheduler.slots[0], b"ELLO")])
    harness.step()
    harness.submit(2, "x" * 40)
    harness.step()
    harness.step()
    assert told == [11, 5, 41, 2]
