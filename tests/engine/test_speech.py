"""The speech engine, scripted: shared batches, windows, pieces, turns, cancels, failures."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np

from tests.support.engine_events import take_events
from trioserve.engine import SpeechEngine
from trioserve.testing import ScriptedSpeaker, heard
from trioserve.types import (
    Admitted,
    EngineEvent,
    Failed,
    FinishReason,
    Sound,
    SpeechTask,
    Spoken,
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
