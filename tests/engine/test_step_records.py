"""Records of steps: what was in the batch, recorded while there are subscribers."""

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
    harness.submit(2, "hi")
    harness.run()
    assert batches(records)[:3] == [(1, 0, 11), (2, 1, 2), (2, 2, 0)]
    assert sum(one.n_prefill for one in records) == 13
    # All but the first of each are made of a token in the batch; the ends are tokens, too.
    assert sum(one.n_decode for one in records) == len("ELLO WORLD.") + len("I.")
    assert records[0].n_running == 1 and records[-1].n_running == 0


def test_drafts_are_in_it() -> None:
    harness = Harness()
    records = watch(harness.engine)
    harness.submit(1, "hello world")
    harness.step()
    slot = harness.engine._scheduler.slots[0]
    harness.engine._scheduler.propose([(slot, tuple(b"ELxO"))])
    harness.step()
    assert batches(records)[1] == (1, 5, 0)


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


def test_nothing_is_recorded_when_nobody_watches() -> None:
    harness = Harness()
    harness.submit(1, "hello")
    harness.run()
    assert harness.engine.n_records == 0


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
