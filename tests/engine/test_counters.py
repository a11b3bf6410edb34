"""What is counted, and when."""

from __future__ import annotations

import pytest

from tests.support.engine_harness import Harness


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
