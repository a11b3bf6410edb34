"""The engine for embeddings on a scripted backend: packing, long texts, turns, failures."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.engine_events import take_events
from tests.support.scripted_embedder import ScriptedEmbedder
from trioserve.engine import EmbeddingEngine
from trioserve.engine.embedding import EmbeddingState
from trioserve.errors import (
    DecodeError,
    EngineError,
    InputTooLongError,
    InvalidRequestError,
    KVCacheFullError,
    NotSupportedError,
)
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


def engine_with(**settings: object) -> tuple[EmbeddingEngine, ScriptedEmbedder]:
    backend = ScriptedEmbedder(**settings)
    return EmbeddingEngine(backend, lambda: None), backend


def task(number: int, *lengths: int, client: str = "") -> EmbeddingTask:
    texts = tuple(tuple((number + i + place) % 50 for i in range(length))
                  for place, length in enumerate(lengths))  # fmt: skip
    return EmbeddingTask(number, texts, client)


def run(engine: EmbeddingEngine, most_steps: int = 10_000) -> dict[int, EngineEvent]:
    """Step until there is no work; returns the last event of each task."""
    for _ in range(most_steps):
        if not engine.step():
            break
    else:
        raise AssertionError("it does not end")
    return {e.task_id: e for e in take_events(engine) if not isinstance(e, Admitted)}


def expected(pooling: str, text: Prompt) -> np.ndarray:
    vectors = np.array([(token, pos, 1) for pos, token in enumerate(text.tokens)], np.float32)
    if pooling == "none":
        return vectors
    if pooling == "mean":
        return vectors.mean(axis=0, keepdims=True)
    return vectors[:1] if pooling == "cls" else vectors[-1:]


def assert_right(pooling: str, one: EmbeddingTask, event: EngineEvent) -> None:
    assert isinstance(event, Embedded)
    assert len(event.embeddings) == len(one.texts)
    for text, vectors in zip(one.texts, event.embeddings, strict=True):
        np.testing.assert_allclose(vectors, expected(pooling, text), rtol=1e-5)


def test_a_task_from_start_to_end() -> None:
    engine, backend = engine_with()
    one = task(1, 3, 2)
    engine.submit(one)
    assert not engine.step()
    admitted, done = take_events(engine)
    assert isinstance(admitted, Admitted) and isinstance(done, Embedded)
    assert_right("mean", one, done)
    assert done.reason is FinishReason.NONE
    assert done.timings.prompt_n == 5 and done.timings.prompt_ms >= 0
    assert backend.held == {}
    assert one.prompt.tokens == (*one.texts[0].tokens, *one.texts[1].tokens)


def test_timings_are_milliseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 10.0
    monkeypatch.setattr("trioserve.engine.embedding.monotonic", lambda: now)
    monkeypatch.setattr("trioserve.engine.queue.monotonic", lambda: now)
    run = EmbeddingState(task(1, 3))
    assert run.waiting_status(1, 10.5).waited_s == 0.5
    run.admitted_at, now = 10.25, 12.25
    timings = run.timings()
    assert (timings.queue_ms, timings.prompt_ms) == (250, 2000)


def test_texts_of_several_requests_share_a_batch() -> None:
    engine, backend = engine_with()
    engine.submit(task(1, 4, 4))
    engine.submit(task(2, 4, 4))
    run(engine)
    assert [len(rows) for rows in backend.batches] == [16]


@settings(deadline=None, max_examples=150)
@given(
    st.data(),
    st.sampled_from(["none", "mean", "cls", "last", "rank"]),
    st.integers(1, 4),
    st.integers(1, 6),
    st.integers(1, 20),
)
def test_whatever_comes_all_of_it_is_right(
    data: st.DataObject, pooling: str, n_slots: int, n_seqs: int, n_batch: int
) -> None:
    n_ctx = data.draw(st.integers(n_batch, 60))
    engine, backend = engine_with(
        pooling=pooling, n_slots=n_slots, n_seqs=n_seqs, n_batch=n_batch, n_ctx=n_ctx
    )
    lengths = st.lists(st.integers(1, n_ctx), min_size=1, max_size=6)
    tasks = [task(i, *one) for i, one in enumerate(data.draw(st.lists(lengths, max_size=6)))]
    for one in tasks:
        engine.submit(one)
        for _ in range(data.draw(st.integers(0, 3))):
            engine.step()
    for one in data.draw(st.lists(st.sampled_from(tasks), max_size=2)) if tasks else ():
        engine.cancel(one.id)
        tasks = [other for other in tasks if other is not one]
    ends = run(engine)
    for one in tasks:
        assert_right(pooling, one, ends[one.id])
    assert backend.held == {} and backend.n_full == 0


def test_a_large_request_holds_up_nobody() -> None:
    engine, backend = engine_with()
    engine.submit(task(1, *[4] * 1000))
    engine.step()
    engine.submit(task(2, 4))
    engine.step()
    done = [event for event in take_events(engine) if isinstance(event, Embedded)]
    assert [event.task_id for event in done] == [2]
    assert len(backend.batches) == 2


def test_long_texts_of_two_requests_take_turns() -> None:
    engine, _ = engine_with(n_batch=4, n_ctx=40)
    engine.submit(task(1, *[40] * 20))
    engine.submit(task(2, 40))
    done: list[int] = []
    for _ in range(30):
        engine.step()
        done += [e.task_id for e in take_events(engine) if isinstance(e, Embedded)]
    assert done == [2]  # after two of the twenty at most


def test_a_text_that_waits_for_room_gets_it() -> None:
    """One request has long texts only, which leave no room; the other's text needs room."""
    engine, _ = engine_with(n_slots=3, n_batch=8, n_ctx=20)
    engine.submit(task(1, *[16] * 50))
    engine.step()
    engine.submit(task(2, 8))
    engine.submit(task(3, *[2] * 500))
    done: list[int] = []
    for _ in range(12):
        engine.step()
        done += [e.task_id for e in take_events(engine) if isinstance(e, Embedded)]
    assert done == [2]


def test_clients_take_turns_in_the_queue() -> None:
    engine, _ = engine_with(n_slots=1, n_seqs=1)
    for number in range(1, 5):
        engine.submit(task(number, 2, client="a"))
    engine.submit(task(5, 2, client="b"))
    order: list[int] = []
    while engine.step() or not order:
        order += [e.task_id for e in take_events(engine) if isinstance(e, Embedded)]
    assert order.index(5) == 1


@pytest.mark.parametrize("can_split", [True, False])
def test_a_text_that_is_too_long_is_refused(can_split: bool) -> None:
    engine, _ = engine_with(can_split=can_split)
    with pytest.raises(InputTooLongError) as caught:
        engine.check(EmbeddingTask(1, ((1,) * 65,), param="documents"))
    assert caught.value.param == "documents"
    assert (caught.value.n_prompt_tokens, caught.value.n_ctx) == (65, 64)
    if can_split:
        engine.check(task(1, 17))
    else:
        with pytest.raises(InputTooLongError, match=r"17 tokens.* 16 tokens.*--ubatch-size") as it:
            engine.check(task(1, 17))
        assert (it.value.n_prompt_tokens, it.value.n_ctx) == (17, 16)


@pytest.mark.parametrize("texts", [(), ((),), ((1,), (2, 10**6)), ((-1,),)])
def test_texts_that_cannot_be_computed_are_refused(texts: tuple[tuple[int, ...], ...]) -> None:
    engine, _ = engine_with()
    with pytest.raises(InvalidRequestError):
        engine.check(EmbeddingTask(1, texts))
    assert not engine.step()


def test_it_makes_no_text() -> None:
    engine, _ = engine_with()
    with pytest.raises(NotSupportedError):
        engine.check(Task(1, Prompt((1, 2))))


def test_a_cancelled_task_is_gone_before_the_next_step() -> None:
    engine, backend = engine_with(n_slots=1)
    engine.submit(task(1, 60, 60))
    engine.submit(task(2, 2))
    engine.step()
    assert backend.held == {0: 16}
    engine.cancel(1)
    engine.cancel(1)
    ends = run(engine)
    assert set(ends) == {2}
    assert len(backend.batches) == 2
    assert backend.held == {}


def cancelling_once(engine: EmbeddingEngine, number: int) -> Callable[[], None]:
    """Make what cancels a task in the midst of the first batch, from another thread."""
    left = [number]

    def cancel() -> None:
        if left:
            engine.cancel(left.pop())

    return cancel


def test_a_cancel_ends_the_batch_that_is_mostly_of_its_task() -> None:
    engine, backend = engine_with()
    other = task(2, 4)
    engine.submit(task(1, 6, 6))
    engine.submit(other)
    backend.meanwhile = cancelling_once(engine, 1)
    ends = run(engine)
    assert set(ends) == {2}
    assert_right("mean", other, ends[2])
    assert [len(rows) for rows in backend.batches] == [4]
    assert backend.held == {}


def test_a_cancel_between_the_inbox_and_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, backend = engine_with()
    engine.submit(task(1, 60))
    monkeypatch.setattr(backend.batch, "clear", cancelling_once(engine, 1))
    assert run(engine) == {}
    assert backend.batches == []


def test_a_cancel_of_a_small_part_interrupts_nothing() -> None:
    engine, backend = engine_with()
    engine.submit(task(1, 4))
    engine.submit(task(2, 6, 6))
    backend.meanwhile = cancelling_once(engine, 1)
    run(engine)
    assert [len(rows) for rows in backend.batches] == [16]


def test_others_lose_no_two_batches_in_a_row() -> None:
    engine, backend = engine_with(n_slots=3)
    for number, length in ((1, 12), (3, 12), (2, 4)):
        engine.submit(task(number, length))
    cancels = [1, 3]
    backend.meanwhile = lambda: engine.cancel(cancels.pop(0)) if cancels else None
    ends = run(engine)
    assert [len(rows) for rows in backend.batches] == [16]
    assert 2 in ends


def test_a_waiting_task_can_be_cancelled() -> None:
    engine, _ = engine_with(n_slots=1)
    engine.submit(task(1, 60))
    engine.submit(task(2, 2))
    engine.step()
    assert len(engine.status().waiting) == 1
    engine.cancel(2)
    assert set(run(engine)) == {1}


def test_no_room_after_all_means_smaller_batches() -> None:
    engine, backend = engine_with()
    backend.failures = [KVCacheFullError("full")]
    tasks = [task(1, 4, 4), task(2, 4, 4)]
    for one in tasks:
        engine.submit(one)
    ends = run(engine)
    assert [len(rows) for rows in backend.batches] == [8, 8]
    for one in tasks:
        assert_right("mean", one, ends[one.id])


def test_a_text_without_room_fails_alone() -> None:
    engine, backend = engine_with()
    backend.failures = [KVCacheFullError("full")]
    engine.submit(task(1, 4))
    ends = run(engine)
    assert isinstance(ends[1], Failed) and isinstance(ends[1].error, KVCacheFullError)
    engine.submit(task(2, 4))
    assert isinstance(run(engine)[2], Embedded)


def test_a_batch_that_fails_ends_its_tasks_and_no_others() -> None:
    engine, backend = engine_with(n_slots=2)
    backend.failures = [DecodeError("broken")]
    for number in (1, 2, 3):
        engine.submit(task(number, 4, 4))
    ends = run(engine)
    assert [type(ends[number]) for number in (1, 2, 3)] == [Failed, Failed, Embedded]
    assert backend.held == {}


def test_numbers_that_are_none_are_an_error() -> None:
    engine, backend = engine_with()
    backend.pooled = lambda seq: np.array([[1, np.nan, 2]], np.float32)  # type: ignore[method-assign]
    engine.submit(task(1, 4))
    ends = run(engine)
    assert isinstance(ends[1], Failed) and "not finite" in ends[1].error.message


def test_when_it_breaks_every_task_fails_now_and_later() -> None:
    engine, backend = engine_with(n_slots=1)
    backend.pooled = lambda seq: 1 / 0  # type: ignore[method-assign]
    engine.submit(task(1, 4))
    engine.submit(task(2, 4))
    ends = run(engine)
    assert all(isinstance(ends[number], Failed) for number in (1, 2))
    with pytest.raises(EngineError):
        engine.check(task(3, 4))
    assert engine.failure is not None


def test_status_tells_of_slots_queue_and_work() -> None:
    engine, _ = engine_with(n_slots=2, n_batch=4)
    for number in (1, 2, 3):
        engine.submit(task(number, 30))
    engine.step()
    status = engine.status()
    assert [(slot.task_id, slot.state, slot.n_prompt) for slot in status.slots] == [
        (1, "prefill", 30),
        (2, "prefill", 30),
    ]
    assert [(one.task_id, one.position, one.n_prompt) for one in status.waiting] == [(3, 1, 30)]
    assert status.counters.prompt_tokens == 4 and status.counters.steps == 1
    run(engine)
    status = engine.status()
    assert [slot.state for slot in status.slots] == ["idle", "idle"]
    assert status.counters.prompt_tokens == 90


def test_stopping_closes_the_backend() -> None:
    engine, backend = engine_with()
    engine.submit(task(1, 4))
    engine.stop()
    engine.run()
    assert backend.closed


def test_pauses_change_nothing_and_calls_are_made() -> None:
    engine, _ = engine_with()
    called: list[int] = []
    engine.submit(task(1, 4))
    engine.pause(1)
    engine.resume(1)
    engine.call(lambda: called.append(1))
    assert isinstance(run(engine)[1], Embedded)
    assert called == [1]


def test_what_a_call_returns_comes_out_with_the_events() -> None:
    engine, _ = engine_with()
    replies: list[int] = []
    engine.call(lambda: 5, replies.append)
    engine.step()
    (event,) = engine.take()
    assert isinstance(event, Returned) and not replies, "the reply is for the event loop"
    event.reply(event.value)
    assert replies == [5]
    with pytest.raises(InvalidRequestError, match="Invalid slot ID"):
        engine.call(lambda: 5, slot_id=engine.n_slots)
