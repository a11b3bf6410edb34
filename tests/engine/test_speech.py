"""The speech engine, scripted: shared batches, windows, pieces, turns, cancels, failures."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from tests.support.engine_events import take_events
from trioserve.engine import SpeechEngine
from trioserve.errors import (
    DecodeError,
    EngineError,
    InputTooLongError,
    InvalidRequestError,
    KVCacheFullError,
    NotSupportedError,
    OutputError,
)
from trioserve.testing import ScriptedSpeaker, heard
from trioserve.types import (
    Admitted,
    DecodedAudio,
    EmbeddingTask,
    EngineEvent,
    Failed,
    FinishReason,
    Prompt,
    Sound,
    SpeechTask,
    Spoken,
    StepRecord,
    Task,
)


class Harness:
    """An engine that steps by hand, and what it has said to each task."""

    def __init__(self, **settings: Any) -> None:
        self.backend = ScriptedSpeaker(**settings)
        self.engine = SpeechEngine(self.backend, lambda: None)
        self.sounds: dict[int, list[Sound]] = defaultdict(list)
        self.ends: dict[int, EngineEvent] = {}
        self.admitted: list[int] = []

    def submit(self, number: int, *texts: str, **options: Any) -> SpeechTask:
        pieces = [self.backend.tokenize(text) for text in texts]
        task = SpeechTask(id=number, pieces=pieces, **options)
        self.engine.check(task)
        self.engine.submit(task)
        return task

    def step(self) -> bool:
        work_left = self.engine.step()
        for event in take_events(self.engine):
            if isinstance(event, Sound):
                assert event.task_id not in self.ends
                self.sounds[event.task_id].append(event)
            elif isinstance(event, Admitted):
                self.admitted.append(event.task_id)
            else:
                assert event.task_id not in self.ends, "two ends"
                self.ends[event.task_id] = event
        return work_left

    def run(self) -> None:
        for _ in range(10_000):
            if not self.step():
                return
        raise AssertionError("the engine does not come to an end")

    def said(self, number: int) -> str:
        sounds = self.sounds[number]
        return heard(np.concatenate([sound.samples for sound in sounds])) if sounds else ""

    def spoken(self, number: int) -> Spoken:
        event = self.ends[number]
        assert isinstance(event, Spoken)
        return event

    def error(self, number: int) -> Exception:
        event = self.ends[number]
        assert isinstance(event, Failed)
        return event.error

    def assert_idle(self) -> None:
        """Check that nothing of any task is left."""
        assert not any(self.backend.held.values())
        assert {slot.state for slot in self.engine.status().slots} == {"idle"}
        assert not self.engine.has_work


def test_texts_are_said_one_after_another() -> None:
    harness = Harness()
    harness.submit(1, "One two.", "Three.")
    harness.run()
    assert harness.said(1) == "One two.Three."
    assert [sound.piece for sound in harness.sounds[1]] == [0, 0, 0, 1, 1]
    end = harness.spoken(1)
    assert end.reason is FinishReason.EOS
    assert (end.n_frames, end.n_prompt) == (14, 9 + 7)
    harness.assert_idle()


def test_the_first_sound_of_a_text_comes_sooner() -> None:
    harness = Harness(window=8)
    harness.submit(1, "a" * 20)
    harness.run()
    n_samples = harness.backend.n_samples
    assert [len(one.samples) // n_samples for one in harness.sounds[1]] == [4, 8, 8]


def test_speakers_share_the_batches() -> None:
    harness = Harness(n_slots=3)
    for number in range(1, 4):
        harness.submit(number, "x" * 10)
    harness.run()
    batches = harness.backend.batches
    # Three at the beginning; later, the sound of one of them is made beside each batch.
    assert batches[:2] == [3 * 11, 3] and set(batches[2:]) <= {1, 2, 3}
    counters = harness.engine.status().counters
    assert (counters.decodes, counters.busy_slots) == (len(batches), 33) and len(batches) <= 15
    # The last batch of each tells that the text has ended.
    assert (counters.prompt_tokens, counters.predicted_tokens) == (33, 33)
    harness.assert_idle()


def test_frames_come_before_texts() -> None:
    harness = Harness(n_batch=8)
    harness.submit(1, "abc")
    harness.step()
    harness.submit(2, "defghijklmnop")
    harness.run()
    assert (harness.said(1), harness.said(2)) == ("abc", "defghijklmnop")
    # The text of the first, then one frame a step of it with as much of the second as fits.
    assert harness.backend.batches[:3] == [4, 8, 8]


def test_a_voice_is_computed_once_for_all_texts() -> None:
    harness = Harness()
    samples = np.zeros(24_000, np.float32).tobytes()
    voice = harness.backend.take_voice(DecodedAudio(rate=24_000, samples=samples, id="v"))
    harness.submit(1, "One.", "Two.", voice=voice)
    harness.run()
    assert harness.said(1) == "One.Two."
    assert all((sound.samples <= 0).all() for sound in harness.sounds[1])
    assert harness.spoken(1).n_prompt == len(voice.rows) + 5 + 5
    harness.assert_idle()


def test_more_tasks_than_slots_wait_by_priority() -> None:
    harness = Harness(n_slots=1)
    harness.submit(1, "aaaa")
    harness.step()
    for number, priority in ((2, 0), (3, 5), (4, -5), (5, 0)):
        harness.submit(number, "bb", priority=priority)
    harness.step()
    status = harness.engine.status()
    assert [one.task_id for one in status.waiting] == [3, 2, 5, 4]
    assert [one.n_prompt for one in status.waiting] == [2] * 4
    harness.run()
    assert harness.admitted == [1, 3, 2, 5, 4]
    assert [harness.said(number) for number in range(1, 6)] == ["aaaa", *["bb"] * 4]
    harness.assert_idle()


# -- limits


def test_the_most_frames_are_of_all_texts_together() -> None:
    harness = Harness()
    harness.submit(1, "abcd", "efgh", max_frames=6)
    harness.submit(2, "abcd", "efgh", max_frames=8)
    harness.run()
    assert harness.said(1) == "abcdef"
    assert (harness.spoken(1).reason, harness.spoken(1).n_frames) == (FinishReason.LIMIT, 6)
    assert harness.said(2) == "abcdefgh"
    harness.assert_idle()


def test_the_context_ends_what_is_said() -> None:
    harness = Harness(n_ctx_seq=10)
    harness.submit(1, "abcdefg", "h")
    harness.run()
    assert harness.said(1) == "abc"  # 8 rows of the text, and 2 of frames
    assert harness.spoken(1).reason is FinishReason.LIMIT
    harness.assert_idle()


def test_tasks_that_can_never_run_are_refused() -> None:
    harness = Harness(n_ctx_seq=10, takes_voices=False)
    harness.submit(1, "a" * 8)
    with pytest.raises(InputTooLongError, match="10 tokens, where the context of"):
        harness.submit(2, "b", "a" * 9)
    for texts in ([], [""], ["a", " "]):
        with pytest.raises(InvalidRequestError, match="nothing to say") as caught:
            harness.submit(3, *texts)
        assert caught.value.param == "input"
    with pytest.raises(InvalidRequestError) as caught:
        harness.submit(4, "a", language="klingon")
    assert caught.value.param == "language"
    with pytest.raises(InvalidRequestError, match="unknown token"):
        harness.engine.check(SpeechTask(id=5, pieces=[(300,)]))
    for task in (Task(6, Prompt((1,))), EmbeddingTask(7, [(1,)])):
        with pytest.raises(NotSupportedError):
            harness.engine.check(task)


@pytest.mark.parametrize(
    "options", [{"seed": -2}, {"seed": 2**32 - 1}, {"top_p": 1.5}, {"top_k": -1}, {"max_frames": 0}]
)
def test_numbers_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        SpeechTask(id=1, pieces=[(1,)], **options)
    assert caught.value.param in options


# -- cancels


def test_a_cancel_while_it_waits() -> None:
    harness = Harness(n_slots=1)
    harness.submit(1, "abcd")
    harness.submit(2, "efgh")
    harness.step()
    harness.engine.cancel(2)
    harness.run()
    assert harness.said(1) == "abcd"
    assert 2 not in harness.ends and 2 not in harness.admitted
    harness.assert_idle()


def test_a_cancel_in_a_long_text_ends_its_batch() -> None:
    harness = Harness(n_batch=128, n_ctx_seq=300)
    harness.submit(1, "a" * 200)
    harness.backend.meanwhile = lambda: harness.engine.cancel(1)
    harness.step()
    assert harness.backend.batches == []  # it was interrupted
    harness.backend.meanwhile = lambda: None
    harness.run()
    assert not harness.ends
    harness.assert_idle()


def test_a_cancel_in_a_short_text_does_not_end_the_batch_of_others() -> None:
    harness = Harness()
    harness.submit(1, "abc")
    harness.submit(2, "def")
    harness.backend.meanwhile = lambda: harness.engine.cancel(1)
    harness.step()
    assert harness.backend.batches == [8]
    harness.run()
    assert harness.said(2) == "def"
    assert 1 not in harness.ends
    harness.assert_idle()


def test_a_cancel_between_frames_frees_the_slot_at_the_next_step() -> None:
    harness = Harness(n_slots=1)
    harness.submit(1, "a" * 50)
    for _ in range(5):
        harness.step()
    harness.submit(2, "bb")
    harness.engine.cancel(1)
    harness.step()
    assert harness.admitted == [1, 2]
    assert harness.backend.n_closed == 1
    harness.run()
    assert harness.said(2) == "bb" and 1 not in harness.ends
    harness.assert_idle()


def test_a_cancel_while_its_sound_is_made_ends_that() -> None:
    harness = Harness()
    harness.submit(1, "abcdef")
    harness.submit(2, "ghijkl")
    harness.backend.on_sound = lambda task: harness.engine.cancel(1) if task.id == 1 else None
    while 1 not in harness.ends and harness.step():
        pass
    assert harness.said(1) == ""
    harness.run()
    assert harness.said(2) == "ghijkl" and 1 not in harness.ends
    harness.assert_idle()


def test_a_cancel_that_comes_before_its_sound_saves_making_it() -> None:
    """It arrives while the sound of another one is made."""
    harness = Harness()
    made: list[int] = []

    def on_sound(task: SpeechTask) -> None:
        made.append(task.id)
        harness.engine.cancel(2)

    harness.submit(1, "abcd")
    harness.submit(2, "efgh")
    harness.backend.on_sound = on_sound
    harness.run()
    assert set(made) == {1}
    assert harness.said(1) == "abcd" and 2 not in harness.ends
    harness.assert_idle()


def test_an_interrupt_that_comes_too_late_costs_no_sound() -> None:
    """It was meant for another sound, and ends this one, which has its turn again."""
    harness = Harness()
    n_left = 3

    def on_sound(_task: SpeechTask) -> None:
        nonlocal n_left
        if n_left:
            n_left -= 1
            harness.backend.interrupt_sound()

    harness.submit(1, "abcdefgh", "ij")
    harness.backend.on_sound = on_sound
    harness.run()
    assert n_left == 0
    assert harness.said(1) == "abcdefghij"
    harness.assert_idle()


def test_an_unknown_task_is_cancelled_without_effect() -> None:
    harness = Harness()
    harness.submit(1, "abc")
    harness.engine.cancel(7)
    harness.run()
    assert harness.said(1) == "abc"


# -- readers who do not keep up


def test_a_paused_speaker_is_left_out_until_it_goes_on() -> None:
    harness = Harness()
    harness.submit(1, "abcdefgh")
    harness.submit(2, "ij")
    harness.step()
    harness.engine.pause(1)
    harness.run()
    assert (harness.said(1), harness.said(2)) == ("", "ij")
    assert harness.engine.status().slots[0].paused
    harness.engine.resume(1)
    harness.run()
    assert harness.said(1) == "abcdefgh"
    harness.assert_idle()


def test_a_task_that_is_paused_before_it_has_a_slot() -> None:
    harness = Harness(n_slots=1)
    harness.submit(1, "ab")
    harness.submit(2, "cd")
    harness.step()
    harness.engine.pause(2)
    harness.run()
    assert harness.admitted == [1, 2] and harness.said(2) == ""
    harness.engine.resume(2)
    harness.run()
    assert harness.said(2) == "cd"


# -- failures


def test_a_decode_error_ends_those_in_the_batch() -> None:
    harness = Harness(n_slots=2)
    for number in range(1, 4):
        harness.submit(number, "abc")
    harness.step()
    harness.backend.failures.append(DecodeError("broken"))
    harness.run()
    assert [type(harness.error(number)) for number in (1, 2)] == [DecodeError] * 2
    assert harness.said(3) == "abc"
    harness.assert_idle()


def test_an_output_that_makes_no_sense_ends_one_speaker() -> None:
    harness = Harness()
    harness.backend.frame_failures[ord("a")] = OutputError("not finite")
    harness.submit(1, "abc")
    harness.submit(2, "def")
    harness.run()
    assert isinstance(harness.error(1), OutputError)
    assert harness.said(2) == "def"
    assert harness.backend.n_closed == 2
    harness.assert_idle()


def test_sound_that_cannot_be_made_ends_one_speaker() -> None:
    harness = Harness()

    def on_sound(task: SpeechTask) -> None:
        if task.id == 1:
            raise OutputError("not finite")

    harness.backend.on_sound = on_sound
    harness.submit(1, "abc")
    harness.submit(2, "def")
    harness.run()
    assert isinstance(harness.error(1), OutputError)
    assert harness.said(2) == "def"
    harness.assert_idle()


def test_a_full_cache_divides_a_batch_and_then_ends_one() -> None:
    harness = Harness(n_slots=4)
    for number in range(1, 5):
        harness.submit(number, "abc")
    harness.backend.failures += [KVCacheFullError("full")] * 3
    harness.run()
    assert isinstance(harness.error(1), KVCacheFullError)
    assert [harness.said(number) for number in (2, 3, 4)] == ["abc"] * 3
    harness.assert_idle()


def test_an_engine_that_breaks_ends_all_tasks() -> None:
    harness = Harness(n_slots=1)
    for number in (1, 2):
        harness.submit(number, "abc")

    def explode() -> None:
        raise ZeroDivisionError

    harness.backend.meanwhile = explode
    harness.step()
    assert {type(harness.error(number)) for number in (1, 2)} == {EngineError}
    with pytest.raises(EngineError):
        harness.engine.check(SpeechTask(id=3, pieces=[(1,)]))
    harness.engine.stop()
    harness.engine.run()
    assert harness.backend.closed
    assert harness.backend.n_closed == 1


def test_the_thread_of_an_engine_ends_with_its_backend() -> None:
    harness = Harness()
    harness.submit(1, "a" * 30)
    harness.step()
    harness.engine.stop()
    harness.engine.run()
    assert harness.backend.closed and harness.backend.n_closed == 1


# -- a look at it


def test_status_and_records_of_steps() -> None:
    harness = Harness(n_slots=2, n_batch=4)
    records: deque[StepRecord] = deque()
    harness.engine.watchers = (records,)
    harness.submit(1, "abcdef")
    harness.step()
    slot = harness.engine.status().slots[0]
    assert (slot.state, slot.task_id, slot.n_past, slot.n_prompt) == ("prefill", 1, 4, 6)
    harness.step()
    slot = harness.engine.status().slots[0]
    assert (slot.state, slot.n_past, slot.n_decoded) == ("decode", 7, 1)
    counters = harness.engine.status().counters
    assert (counters.n_cells_used, counters.n_tokens_max, counters.n_cells) == (7, 7, 512)
    harness.run()
    assert [(one.n_slots, one.n_decode, one.n_prefill) for one in list(records)[:3]] == [
        (1, 0, 4),
        (1, 1, 3),
        (1, 1, 0),
    ]
    timings = harness.spoken(1).timings
    assert (timings.prompt_n, timings.predicted_n) == (7, 6)
    assert min(timings.queue_ms, timings.prompt_ms, timings.predicted_ms) >= 0


_TEXTS = st.lists(st.text("abcdefgh", min_size=1, max_size=30), min_size=1, max_size=3)
_ACTS = st.tuples(
    st.integers(0, 40), st.sampled_from(["cancel", "pause", "resume"]), st.integers(1, 5)
)


@settings(max_examples=60, deadline=None)
@given(
    tasks=st.lists(_TEXTS, min_size=1, max_size=5),
    acts=st.lists(_ACTS, max_size=12),
    n_slots=st.integers(1, 3),
    n_batch=st.integers(3, 40),
)
def test_whatever_happens_the_others_say_all_of_their_texts(
    tasks: list[list[str]], acts: list[tuple[int, str, int]], n_slots: int, n_batch: int
) -> None:
    harness = Harness(n_slots=n_slots, n_batch=n_batch)
    for number, texts in enumerate(tasks, start=1):
        harness.submit(number, *texts)
    cancelled: set[int] = set()
    for step in range(41):
        for when, act, number in acts:
            if when == step:
                getattr(harness.engine, act)(number)
                cancelled |= {number} if act == "cancel" else set()
        harness.step()
    for number in range(1, 6):
        harness.engine.resume(number)
    harness.run()
    for number, texts in enumerate(tasks, start=1):
        whole = "".join(texts)
        if number not in cancelled:
            assert harness.said(number) == whole
            assert isinstance(harness.ends[number], Spoken)
        else:
            assert whole.startswith(harness.said(number))
    harness.assert_idle()


def test_the_sound_of_one_speaker_is_made_in_a_step() -> None:
    """So a step does not last longer the more speakers there are. Who was not heard comes first."""
    harness = Harness(n_slots=3, window=4)
    made: list[int] = []
    harness.backend.on_sound = lambda task: made.append(task.id)
    for number in (1, 2):
        harness.submit(number, "x" * 12)
    steps = 0
    while harness.step():
        steps += 1
        if steps == 3:
            harness.submit(3, "y" * 12)
        assert len(made) <= steps
    first_of_third = made.index(3)
    assert set(made[:first_of_third]) == {1, 2} and first_of_third <= 4
    assert [harness.said(number)[-1] for number in (1, 2, 3)] == ["x", "x", "y"]
