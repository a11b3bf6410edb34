"""Counters, and records of steps, which are made while there are subscribers."""

from __future__ import annotations

from collections import deque

import pytest

from tests.support.engine_harness import Harness
from tests.support.scripted_embedder import ScriptedEmbedder
from trioserve.engine import EmbeddingEngine
from trioserve.errors import DecodeError
from trioserve.testing import ScriptedBackend
from trioserve.types import EmbeddingTask, StepRecord


def watch(engine: object) -> deque[StepRecord]:
    records: deque[StepRecord] = deque()
    engine.watchers = (records,)  # type: ignore[attr-defined]
    return records


def batches(records: deque[StepRecord]) -> list[tuple[int, int, int]]:
    """Slots, tokens of outputs, and tokens of prompts, of the steps with a batch."""
    return [(one.n_slots, one.n_decode, one.n_prefill) for one in records if one.n_slots]


def test_the_tokens_of_a_batch_are_those_that_the_backend_gets() -> None:
    harness = Harness(ScriptedBackend(n_slots=2))
    records = watch(harness.engine)
    harness.submit(1, "hello world")
    harness.step()
    harness.complete(2, "hi")
    assert batches(records)[:3] == [(1, 0, 11), (2, 1, 2), (2, 2, 0)]
    assert sum(one.n_prefill for one in records) == 13
    # All but the first of each are made of a token in the batch; the ends are tokens, too.
    assert sum(one.n_decode for one in records) == len("ELLO WORLD.") + len("I.")
    assert records[0].n_running == 1 and records[-1].n_running == 0


def test_a_step_whose_decode_fails_has_nothing_in_it() -> None:
    harness = Harness()
    records = watch(harness.engine)
    harness.submit(1, "hello")
    harness.step()
    harness.backend.fail_next = DecodeError("bad luck")
    harness.step()
    assert [(one.n_slots, one.n_decode, one.n_prefill) for one in records] == [(1, 0, 5), (0, 0, 0)]
    assert [one.index for one in records] == [1, 2] and harness.engine.n_records == 2
    assert [round(one.ms, 6) for one in records] == [0.15, 0.11]
    assert [one.began for one in records] == [0.0, pytest.approx(0.15e-3)]


def test_embeddings_are_prompts() -> None:
    engine = EmbeddingEngine(ScriptedEmbedder(n_batch=16), lambda: None)
    records = watch(engine)
    engine.submit(EmbeddingTask(1, ((1,) * 5, (2,) * 6)))
    engine.submit(EmbeddingTask(2, ((3,) * 4,)))
    while engine.step():
        pass
    assert sum(one.n_prefill for one in records) == 15
    assert {one.n_decode for one in records} == {0}
    assert records[0].n_slots == 2 and records[-1].n_running == 0


def test_totals_are_of_all_runs_those_that_go_on_too() -> None:
    harness = Harness()
    for task_id, steps in ((1, 100), (2, 3)):
        harness.submit(task_id, "hello world", max_tokens=4)
        for _ in range(steps):
            harness.step()
    counted = harness.engine.status().counters
    assert (counted.prompt_queries, counted.cached_tokens, counted.prompt_tokens) == (22, 10, 12)
    assert (counted.steps, counted.decodes, counted.busy_slots) == (7, 7, 7)
    assert (counted.predicted_tokens, counted.n_tokens_max) == (4 + 3, 15)
    assert counted.step_s == pytest.approx(7 * 1e-4 + (12 + 3 + 2) * 1e-5)
    assert counted.prompt_s == pytest.approx(2 * 1e-4 + 12 * 1e-5)


def test_a_slot_counts_while_it_is_in_a_batch_and_a_prompt_when_it_is_admitted() -> None:
    harness = Harness()
    for task_id in (1, 2, 3):
        harness.submit(task_id, "one", max_tokens=2, cache_prompt=False)
    harness.step()
    counted = harness.engine.status().counters
    assert (counted.busy_slots, counted.prompt_queries, counted.cached_tokens) == (2, 6, 0)
    harness.engine.cancel(3)
    harness.run()
    counted = harness.engine.status().counters
    assert (counted.busy_slots, counted.predicted_tokens, counted.steps) == (4, 4, 2)


def test_drafts_are_counted_while_their_run_goes_on_and_after_it() -> None:
    harness = Harness()
    for n_ended in (0, 1):
        harness.submit(n_ended, "hello world", cache_prompt=False)
        harness.step()
        scheduler = harness.engine._scheduler
        scheduler.propose([(scheduler.slots[n_ended], b"ELxO")])
        harness.step()
        for _ in range(2):
            counted = harness.engine.status().counters
            n = n_ended + 1
            assert (counted.drafts, counted.draft_tokens, counted.accepted_tokens) == (
                n,
                4 * n,
                2 * n,
            )
            harness.run()
