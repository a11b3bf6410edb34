"""The engine for embeddings, scripted: packing, long texts, images, turns, cancels, failures."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.engine_events import take_events
from tests.support.scripted_embedder import ScriptedEmbedder
from tests.support.scripted_media import prompt_of
from trioserve.engine import EmbeddingEngine
from trioserve.engine.embedding import EmbeddingState
from trioserve.engine.queue import waiting_status
from trioserve.errors import (
    DecodeError,
    EncodeError,
    EngineError,
    InputTooLongError,
    InvalidMediaError,
    InvalidRequestError,
    KVCacheFullError,
    NotSupportedError,
)
from trioserve.testing import ScriptedProjector
from trioserve.testing.projector import embeddings_of
from trioserve.types import (
    Admitted,
    Embedded,
    EmbeddingTask,
    EngineEvent,
    Failed,
    FinishReason,
    Prompt,
    Returned,
    Task,
)

CELLS = 5


class Harness:
    """An engine whose encoder has no thread: `run` does its work."""

    def __init__(self, projector: ScriptedProjector | None = None, **settings: object) -> None:
        self.projector = projector or ScriptedProjector(n_cells=CELLS)
        self.backend = ScriptedEmbedder(projector=self.projector, **settings)
        self.engine = EmbeddingEngine(self.backend, lambda: None)
        assert self.engine.encoder is not None
        self.encoder = self.engine.encoder
        self.encoder.has_thread = False
        self.ends: dict[int, EngineEvent] = {}

    def submit(self, number: int, *texts: str | int) -> EmbeddingTask:
        """Send texts, or some of these lengths."""
        made = [
            Prompt([(number + place + i) % 50 for i in range(text)])
            if isinstance(text, int)
            else prompt_of(text, self.projector)
            for place, text in enumerate(texts)
        ]
        task = EmbeddingTask(number, made)
        self.engine.check(task)
        self.engine.submit(task)
        return task

    def step(self) -> bool:
        """Run a step; returns whether there is another one to run without more being encoded."""
        work_left = self.engine.step()
        for event in take_events(self.engine):
            if not isinstance(event, Admitted):
                self.ends[event.task_id] = event
        return work_left

    def run(self) -> None:
        for _ in range(10_000):
            if not self.step() and not self.encoder.encode_next():
                return
        raise AssertionError("it does not end")

    @property
    def n_rows(self) -> list[int]:
        return [len(rows) for rows in self.backend.batches]

    def check(self, *tasks: EmbeddingTask) -> None:
        """Check that tasks have all of their embeddings, and the right ones."""
        for task in tasks:
            end = self.ends[task.id]
            assert isinstance(end, Embedded) and len(end.embeddings) == len(task.texts)
            for text, found in zip(task.texts, end.embeddings, strict=True):
                np.testing.assert_allclose(found, self._expected(text), rtol=1e-4, atol=1e-5)

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


def test_a_task_from_start_to_end() -> None:
    one = Harness()
    task = one.submit(1, 3, 2)
    assert not one.engine.step()
    admitted, done = take_events(one.engine)
    assert isinstance(admitted, Admitted) and isinstance(done, Embedded)
    one.ends[1] = done
    one.check(task)
    assert done.reason is FinishReason.NONE
    assert done.timings.prompt_n == 5 and done.timings.prompt_ms >= 0
    assert one.backend.held == {}


def test_timings_are_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("trioserve.engine.embedding.monotonic", lambda: now)
    monkeypatch.setattr("trioserve.engine.queue.monotonic", lambda: now)
    request = EmbeddingState(EmbeddingTask(1, [Prompt((1,))]))
    now = 10.5
    assert waiting_status([request])[0].waited_s == 0.5
    request.admitted_at, now = 10.25, 12.25
    timings = request.timings()
    assert (timings.queue_ms, timings.prompt_ms) == (250, 2000)


@settings(deadline=None, max_examples=100)
@given(st.data(), st.sampled_from(["none", "mean", "cls", "last", "rank"]), st.booleans())
def test_all_embeddings_are_right(data: st.DataObject, pooling: str, is_causal: bool) -> None:
    draw = data.draw
    n_cells = draw(st.integers(1, 6))
    n_positions = draw(st.integers(1, n_cells))
    n_batch = draw(st.integers(1 if is_causal else n_cells, 20))
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
    part = st.one_of(st.sampled_from(["[image:x]", "[image:y]"]), st.text("abc", max_size=20))
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
    one.check(*(task for task in tasks if task not in gone))
    assert one.backend.held == {} and one.backend.n_full == 0


# -- turns


def test_texts_of_several_requests_share_a_batch() -> None:
    one = Harness()
    one.submit(1, 4, 4)
    one.submit(2, 4, 4)
    one.run()
    assert one.n_rows == [16]


@pytest.mark.parametrize(
    ("settings", "large", "others", "n_steps"),
    [
        ({}, [4] * 1000, [[4]], 1),
        ({"n_batch": 4, "n_ctx": 40}, [40] * 20, [[40]], 29),  # after two of the twenty at most
        # The first leaves no room for the second's text, and the third's texts always fit.
        ({"n_slots": 3, "n_batch": 8, "n_ctx": 20}, [16] * 50, [[8], [2] * 500], 11),
    ],
)
def test_a_large_request_does_not_hold_up_others(
    settings: dict[str, int], large: list[int], others: list[list[int]], n_steps: int
) -> None:
    one = Harness(**settings)
    one.submit(1, *large)
    one.step()
    for number, lengths in enumerate(others, start=2):
        one.submit(number, *lengths)
    for _ in range(n_steps):
        one.step()
    assert list(one.ends) == [2]


# -- tasks that are refused


@pytest.mark.parametrize("can_split", [True, False])
def test_a_text_that_is_too_long_is_refused(can_split: bool) -> None:
    one = Harness(can_split=can_split)
    with pytest.raises(InputTooLongError) as caught:
        one.engine.check(EmbeddingTask(1, ((1,) * 65,), param="documents"))
    assert caught.value.param == "documents"
    assert (caught.value.n_prompt_tokens, caught.value.n_ctx) == (65, 64)
    if can_split:
        one.submit(1, 17)
    else:
        with pytest.raises(InputTooLongError, match=r"17 tokens.* 16 tokens.*--ubatch-size") as it:
            one.submit(1, 17)
        assert (it.value.n_prompt_tokens, it.value.n_ctx) == (17, 16)


@pytest.mark.parametrize("texts", [(), ((),), ((1,), (2, 10**6)), ((-1,),)])
def test_texts_that_cannot_be_computed_are_refused(texts: tuple[tuple[int, ...], ...]) -> None:
    engine = Harness().engine
    with pytest.raises(InvalidRequestError):
        engine.check(EmbeddingTask(1, texts))
    with pytest.raises(NotSupportedError):
        engine.check(Task(1, Prompt((1, 2))))
    assert not engine.step()


def test_media_that_the_model_cannot_take_are_refused() -> None:
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


# -- cancels


def test_a_cancelled_task_is_gone_before_the_next_step() -> None:
    one = Harness(n_slots=1)
    one.submit(1, 60, 60)
    one.submit(2, 2)
    one.step()
    assert one.backend.held == {0: 16}
    one.engine.cancel(1)
    one.engine.cancel(1)
    one.run()
    assert set(one.ends) == {2}
    assert len(one.backend.batches) == 2
    assert one.backend.held == {}


def cancelling(engine: EmbeddingEngine, *numbers: int) -> Callable[[], None]:
    """Make a function that cancels a task at each call, as if from another thread."""
    left = list(numbers)

    def cancel() -> None:
        if left:
            engine.cancel(left.pop(0))

    return cancel


@pytest.mark.parametrize(
    ("lengths", "cancelled", "n_rows"),
    [
        ({1: [6, 6], 2: [4]}, [1], [4]),
        ({1: [4], 2: [6, 6]}, [1], [16]),  # of a small part, which interrupts nothing
        ({1: [12], 3: [12], 2: [4]}, [1, 3], [16]),  # others lose no two batches in a row
    ],
)
def test_a_cancel_ends_the_batch_that_is_mostly_of_its_task(
    lengths: dict[int, list[int]], cancelled: list[int], n_rows: list[int]
) -> None:
    one = Harness(n_slots=3)
    tasks = [one.submit(number, *its) for number, its in lengths.items()]
    one.backend.meanwhile = cancelling(one.engine, *cancelled)
    one.run()
    one.check(*(task for task in tasks if task.id == 2))
    assert one.n_rows == n_rows
    assert one.backend.held == {}


def test_a_cancel_between_the_inbox_and_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    one = Harness()
    one.submit(1, 60)
    monkeypatch.setattr(one.backend.batch, "clear", cancelling(one.engine, 1))
    one.run()
    assert one.ends == {} and one.backend.batches == []


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


# -- failures


def test_no_room_after_all_means_smaller_batches() -> None:
    one = Harness()
    one.backend.failures = [KVCacheFullError("full")]
    tasks = [one.submit(1, 4, 4), one.submit(2, 4, 4)]
    one.run()
    assert one.n_rows == [8, 8]
    one.check(*tasks)


def test_a_text_without_room_fails_alone() -> None:
    one = Harness()
    one.backend.failures = [KVCacheFullError("full")]
    one.submit(1, 4)
    one.run()
    failed = one.ends[1]
    assert isinstance(failed, Failed) and isinstance(failed.error, KVCacheFullError)
    task = one.submit(2, 4)
    one.run()
    one.check(task)


def test_a_batch_that_fails_ends_its_tasks_and_no_others() -> None:
    one = Harness(n_slots=2)
    one.backend.failures = [DecodeError("broken")]
    for number in (1, 2, 3):
        one.submit(number, 4, 4)
    one.run()
    assert [type(one.ends[number]) for number in (1, 2, 3)] == [Failed, Failed, Embedded]
    assert one.backend.held == {}


def test_numbers_that_are_not_finite_are_an_error() -> None:
    one = Harness()
    one.backend.pooled = lambda seq: np.array([[1, np.nan, 2]], np.float32)  # type: ignore[method-assign]
    one.submit(1, 4)
    one.run()
    failed = one.ends[1]
    assert isinstance(failed, Failed) and "not finite" in failed.error.message


def test_when_it_breaks_every_task_fails_now_and_later() -> None:
    one = Harness(n_slots=1)
    one.backend.pooled = lambda seq: 1 / 0  # type: ignore[method-assign]
    one.submit(1, 4)
    one.submit(2, 4)
    one.run()
    assert all(isinstance(one.ends[number], Failed) for number in (1, 2))
    with pytest.raises(EngineError):
        one.submit(3, 4)
    assert one.engine.failure is not None
    one.engine.stop()
    one.engine.run()
    assert one.backend.closed


# -- the engine from outside


def test_status_tells_of_slots_queue_and_work() -> None:
    one = Harness(n_slots=2, n_batch=4)
    for number in (1, 2, 3):
        one.submit(number, 30)
    one.step()
    status = one.engine.status()
    slots = [(slot.task_id, slot.state, slot.n_prompt) for slot in status.slots]
    assert slots == [(1, "prefill", 30), (2, "prefill", 30)]
    assert [(task.task_id, task.position, task.n_prompt) for task in status.waiting] == [(3, 1, 30)]
    assert status.counters.prompt_tokens == 4 and status.counters.steps == 1
    one.run()
    status = one.engine.status()
    assert [slot.state for slot in status.slots] == ["idle", "idle"]
    assert status.counters.prompt_tokens == 90


def test_the_result_of_a_call_comes_out_with_the_events() -> None:
    engine, replies = Harness().engine, list[int]()
    engine.call(lambda: 5, replies.append)
    engine.step()
    (event,) = engine.take()
    assert isinstance(event, Returned) and not replies, "the reply is for the event loop"
    event.reply(event.value)
    assert replies == [5]
    with pytest.raises(InvalidRequestError, match="Invalid slot ID"):
        engine.call(lambda: 5, slot_id=engine.n_slots)


# -- media


def test_a_text_with_an_image_comes_in_parts() -> None:
    one = Harness()
    task = one.submit(1, "ab[image:x]c")
    one.run()
    one.check(task)
    assert one.n_rows == [2, CELLS, 1]
    assert one.projector.encoded == ["x"]
    assert len(task.prompt) == 2 + CELLS + 1


def test_other_texts_are_computed_while_an_image_is_encoded() -> None:
    one = Harness()
    picture, text = one.submit(1, "a[image:x]"), one.submit(2, *["abcd"] * 20)
    one.engine.pause(2)  # has no effect: no reader can leave tokens unread
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
    one.check(*tasks)
    assert one.projector.encoded == ["x"]


def test_a_chunk_that_cannot_be_encoded_fails_the_requests_that_need_it() -> None:
    one = Harness()
    one.projector.fail_next = EncodeError("broken")
    one.submit(1, "[image:x]")
    other = one.submit(2, "[image:y]")
    one.run()
    failed = one.ends[1]
    assert isinstance(failed, Failed) and isinstance(failed.error, EncodeError)
    again = one.submit(3, "[image:x]")
    one.run()
    one.check(other, again)


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
