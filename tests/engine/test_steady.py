"""Steps that differ from the one before in nothing but their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from tests.support.engine_harness import Harness
from trioserve.errors import EngineError
from trioserve.testing import ScriptedBackend
from trioserve.types import Chunk, Failed, Finished


class Counting(Harness):
    """Counts the steps that were scheduled, and those that were not."""

    def __init__(self, backend: ScriptedBackend | None = None, **settings: Any) -> None:
        super().__init__(backend or ScriptedBackend(endless, n_slots=4), **settings)
        self.n_scheduled = 0
        schedule = self.engine._scheduler.schedule

        def counting() -> Any:
            self.n_scheduled += 1
            return schedule()

        self.engine._scheduler.schedule = counting  # type: ignore[method-assign]

    def count(self, n_steps: int) -> int:
        """Run steps; returns the number of those that were scheduled."""
        before = self.n_scheduled
        for _ in range(n_steps):
            self.step()
        return self.n_scheduled - before

    def text(self, task_id: int) -> str:
        return "".join(one.text for one in self.events[task_id] if isinstance(one, Chunk))


def endless(prompt: str) -> str:
    return "abcdefghij" * 100


def submit(harness: Harness, count: int = 3, **options: Any) -> None:
    for task_id in range(1, count + 1):
        harness.submit(task_id, f"{task_id} prompt", **options)


def test_nothing_is_scheduled_while_only_tokens_are_new() -> None:
    harness = Counting()
    submit(harness)
    harness.count(5)  # the prompts, and the first tokens
    assert harness.count(100) == 0
    for task_id in (1, 2, 3):
        assert len(harness.text(task_id)) > 100
        assert harness.text(task_id) == endless("")[: len(harness.text(task_id))]
    harness.submit(4, "another prompt")
    assert harness.count(1) == 1
    harness.count(3)
    assert harness.count(50) == 0
    assert harness.text(4).startswith("abcdef")


def test_a_line_that_ends_is_looked_at_in_the_same_step() -> None:
    lines = "one\ntwo\n" * 50
    harness = Counting(ScriptedBackend(lambda prompt: lines, n_slots=4))
    submit(harness)
    harness.count(5)
    assert harness.count(60) == 0
    for task_id in (1, 2, 3):
        assert harness.text(task_id) == lines[: len(harness.text(task_id))]
        assert len(harness.text(task_id)) > 60


def test_a_request_that_waits_is_looked_at_in_each_step() -> None:
    harness = Counting(ScriptedBackend(endless, n_slots=2))
    submit(harness)
    harness.count(5)
    assert harness.count(20) == 20


@pytest.mark.parametrize("command", ["cancel", "pause"])
def test_a_command_ends_it(command: str) -> None:
    harness = Counting()
    submit(harness)
    harness.count(10)
    getattr(harness.engine, command)(2)
    n_before = len(harness.text(2))
    assert harness.count(1) == 1
    assert harness.count(20) <= 1
    assert len(harness.text(2)) == n_before
    if command == "pause":
        harness.engine.resume(2)
        harness.count(5)
        assert harness.text(2) == endless("")[: len(harness.text(2))]
        assert len(harness.text(2)) > n_before


def test_outputs_end_where_they_should() -> None:
    harness = Counting()
    for task_id, max_tokens in ((1, 5), (2, 30), (3, 31)):
        harness.submit(task_id, f"{task_id} prompt", max_tokens=max_tokens)
    harness.run()
    for task_id, max_tokens in ((1, 5), (2, 30), (3, 31)):
        assert harness.text(task_id) == endless("")[:max_tokens]
        (end,) = [one for one in harness.events[task_id] if isinstance(one, Finished)]
        assert end.timings.predicted_n == max_tokens
    assert harness.n_scheduled < 20


def test_an_error_of_a_sampler_fails_one_request() -> None:
    harness = Counting()
    submit(harness)
    harness.count(10)
    slot = harness.engine._scheduler.slots[1]
    assert slot.request is not None and slot.request.sampler is not None
    task_id, error = slot.request.task.id, EngineError("no number")

    def fail(row: int) -> int:
        raise error

    slot.request.sampler.sample = fail  # type: ignore[method-assign]
    assert harness.count(1) == 0
    harness.count(10)
    assert [one for one in harness.events[task_id] if isinstance(one, Failed)]
    for other in {1, 2, 3} - {task_id}:
        assert harness.text(other) == endless("")[: len(harness.text(other))]
        assert len(harness.text(other)) > 15


@pytest.mark.parametrize("more", [{"n_probs": 2}, {"t_max_predict_ms": 10_000}])
def test_requests_that_look_at_each_token_are_scheduled(more: dict[str, int]) -> None:
    harness = Counting()
    submit(harness, count=2)
    harness.submit(3, "3 prompt", **more)
    harness.count(5)
    assert harness.count(20) == 20


def test_records_of_repeated_steps_are_the_same() -> None:
    harness = Counting()
    submit(harness)
    harness.count(10)
    records: list[Any] = []
    harness.engine.watchers = (records,)
    assert harness.count(3) == 0
    seen: Sequence[Any] = [(one.n_slots, one.n_decode, one.n_prefill) for one in records]
    assert seen == [(3, 3, 0)] * 3
