"""The engine for embeddings with images that exist in name only."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.engine_events import take_events
from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.scripted_media import prompt_of
from trioserve.engine import EmbeddingEngine
from trioserve.errors import (
    DecodeError,
    EncodeError,
    InputTooLongError,
    InvalidMediaError,
    InvalidRequestError,
)
from trioserve.testing import ScriptedProjector
from trioserve.testing.projector import embeddings_of
from trioserve.types import Admitted, Embedded, EmbeddingTask, EngineEvent, Failed, Prompt

CELLS = 5


class Harness:
    """An engine whose encoder has no thread: `encode` does its work."""

    def __init__(self, projector: ScriptedProjector | None = None, **settings: object) -> None:
        self.projector = projector or ScriptedProjector(n_cells=CELLS)
        self.backend = ScriptedEmbedder(projector=self.projector, **settings)
        self.engine = EmbeddingEngine(self.backend, lambda: None)
        assert self.engine.encoder is not None
        self.encoder = self.engine.encoder
        self.encoder.has_thread = False
        self.ends: dict[int, EngineEvent] = {}

    def submit(self, number: int, *texts: str) -> EmbeddingTask:
        task = EmbeddingTask(number, [prompt_of(text, self.projector) for text in texts])
        self.engine.check(task)
        self.engine.submit(task)
        return task

    def step(self) -> bool:
        """Run a step; returns whether there is another one to run without more being encoded."""
        goes_on = self.engine.step()
        for event in take_events(self.engine):
            if not isinstance(event, Admitted):
                self.ends[event.task_id] = event
        return goes_on

    def run(self) -> None:
        """Go on until nothing is left to do."""
        for _ in range(10_000):
            if not self.step() and not self.encoder.encode_next():
                break
        else:
            raise AssertionError("it does not end")

    def check(self, task: EmbeddingTask) -> None:
        """Check that the task has all of its embeddings, and the right ones."""
        end = self.ends[task.id]
        assert isinstance(end, Embedded)
        for text, found in zip(task.texts, end.embeddings, strict=True):
            expected = self._expected(text)
            np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)

    def _expected(self, text: Prompt) -> np.ndarray:
        rows: list[tuple[float, int, int]] = []
        cell = pos = 0
        while cell < len(text):
            stop, chunk = text.part_from(cell)
            if chunk is None:
                rows += [(key, pos + i, 1) for i, key in enumerate(text.keys[cell:stop])]
                pos += stop - cell
            else:
                numbers = embeddings_of(chunk, self.projector.n_embd)[:, 0]
                rows += [(float(number), pos, 1) for number in numbers]
                pos += chunk.n_positions
            cell = stop
        vectors = np.array(rows, np.float32)
        match self.backend.pooling:
            case "none":
                return vectors
            case "mean":
                return vectors.mean(axis=0, keepdims=True)
            case "cls":
                return vectors[:1]
        return vectors[-1:]


def test_a_text_with_an_image_comes_in_parts() -> None:
    one = Harness()
    task = one.submit(1, "ab[image:x]c")
    one.run()
    one.check(task)
    assert [len(rows) for rows in one.backend.batches] == [2, CELLS, 1]
    assert one.backend.held == {} and one.projector.encoded == ["x"]
    assert len(task.prompt) == 2 + CELLS + 1


def test_other_texts_go_on_while_an_image_is_encoded() -> None:
    one = Harness()
    picture, text = one.submit(1, "a[image:x]"), one.submit(2, *["abcd"] * 20)
    while one.step():
        pass
    one.check(text)
    assert 1 not in one.ends
    assert [slot.encoding for slot in one.engine.status().slots] == [True, False]
    assert not one.engine.has_work, "it would spin"
    one.run()
    one.check(picture)


def test_an_image_in_many_texts_is_encoded_once() -> None:
    one = Harness(n_slots=8)
    tasks = [one.submit(number, *["[image:x] a"] * 3) for number in range(8)]
    one.run()
    for task in tasks:
        one.check(task)
    assert one.projector.encoded == ["x"]


def test_one_that_cannot_be_encoded_fails_those_that_need_it() -> None:
    one = Harness()
    one.projector.fail_next = EncodeError("broken")
    one.submit(1, "[image:x]")
    other = one.submit(2, "[image:y]")
    one.run()
    failed = one.ends[1]
    assert isinstance(failed, Failed) and isinstance(failed.error, EncodeError)
    one.check(other)
    again = one.submit(3, "[image:x]")  # it is tried again
    one.run()
    one.check(again)


def test_a_cancelled_task_gets_no_failure() -> None:
    one = Harness()
    one.projector.fail_next = EncodeError("broken")
    one.submit(1, "[image:x]")
    while one.step():
        pass
    assert one.encoder.encode_next()
    one.engine.cancel(1)
    one.run()
    assert one.ends == {}


def test_a_cancelled_task_is_not_encoded() -> None:
    one = Harness()
    one.submit(1, "ab[image:x]")
    while one.step():
        pass
    one.engine.cancel(1)
    one.run()
    assert one.projector.encoded == [] and one.ends == {}
    assert one.backend.held == {}


def test_a_cancel_ends_the_encoding_that_runs() -> None:
    """With a thread, which is stuck in it."""
    one = Harness()
    one.encoder.has_thread = True
    one.encoder.start()
    one.projector.gate.clear()
    begun = threading.Event()
    one.projector.on_encode = lambda _chunk: begun.set()
    one.submit(1, "[image:x]")
    try:
        one.step()
        assert begun.wait(10) and not one.projector.is_interrupted
        one.engine.cancel(1)
        one.step()
        assert one.projector.is_interrupted
    finally:
        one.encoder.close()
    assert one.projector.encoded == []


def test_a_decode_that_fails_takes_nothing_else_with_it() -> None:
    one = Harness()
    one.submit(1, "[image:x]")
    while one.step():
        pass
    one.encoder.encode_next()
    one.backend.failures = [DecodeError("broken")]
    one.step()
    assert isinstance(one.ends[1], Failed)
    task = one.submit(2, "a[image:x]b")
    one.run()
    one.check(task)
    assert one.backend.held == {}


def test_what_the_model_cannot_take_is_refused() -> None:
    images = ScriptedProjector(n_cells=CELLS)
    task = EmbeddingTask(1, [prompt_of("[image:x]", images)])
    without = EmbeddingEngine(ScriptedEmbedder(), lambda: None)
    with pytest.raises(InvalidRequestError, match="text only"):
        without.check(task)
    whole = Harness(ScriptedProjector(n_cells=CELLS, is_causal=False), n_batch=CELLS - 1)
    with pytest.raises(InvalidMediaError, match=f"takes {CELLS} tokens, .* {CELLS - 1} is"):
        whole.submit(1, "[image:x]")
    with pytest.raises(InputTooLongError):
        Harness(n_ctx=16).submit(1, "[image:x]" * 4)


@settings(deadline=None, max_examples=80)
@given(st.data(), st.sampled_from(["none", "mean", "cls", "last"]), st.booleans())
def test_whatever_comes_all_of_it_is_right(
    data: st.DataObject, pooling: str, is_causal: bool
) -> None:
    draw = data.draw
    n_cells = draw(st.integers(1, 6))
    n_positions = draw(st.integers(1, n_cells))
    n_batch = draw(st.integers(1 if is_causal else n_cells, 12))
    n_ctx = draw(st.integers(max(n_batch, 12), 60))
    projector = ScriptedProjector(n_cells=n_cells, n_positions=n_positions, is_causal=is_causal)
    one = Harness(
        projector,
        pooling=pooling,
        n_slots=draw(st.integers(1, 4)),
        n_seqs=draw(st.integers(1, 6)),
        n_batch=n_batch,
        n_ctx=n_ctx,
    )
    part = st.one_of(st.sampled_from(["[image:x]", "[image:y]"]), st.text("abc", max_size=8))
    text = st.lists(part, min_size=1, max_size=4).map("".join)
    text = text.filter(lambda text: 0 < len(prompt_of(text, projector)) <= n_ctx)
    tasks: list[EmbeddingTask] = []
    for number, texts in enumerate(draw(st.lists(st.lists(text, min_size=1, max_size=4)))):
        tasks.append(one.submit(number, *texts))
        for _ in range(draw(st.integers(0, 3))):
            one.step()
        if draw(st.booleans()):
            one.encoder.encode_next()
    gone = draw(st.lists(st.sampled_from(tasks), max_size=2)) if tasks else []
    for task in gone:
        one.engine.cancel(task.id)
    one.run()
    for task in tasks:
        if task not in gone:
            one.check(task)
    assert one.backend.held == {} and one.backend.n_full == 0
