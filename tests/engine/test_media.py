"""Prompts with media: what is encoded, when it is decoded, and what is used again."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from tests.support.engine_harness import Harness
from tests.support.scripted_media import prompt_of
from trioserve.engine import DraftRequest
from trioserve.engine.strategy import PrefillPriority
from trioserve.errors import (
    EncodeError,
    InvalidRequestError,
    UnavailableError,
)
from trioserve.testing import ScriptedBackend, ScriptedProjector
from trioserve.types import Failed, FinishReason, GenerationParams, MediaChunk, Task


class MediaHarness(Harness):
    """An engine with a scripted projector, which encodes in the test's own thread."""

    def __init__(
        self,
        projector: ScriptedProjector | None = None,
        fields: dict[str, object] | None = None,
        **settings: object,
    ) -> None:
        self.projector = projector or ScriptedProjector()
        backend = ScriptedBackend(projector=self.projector, **(fields or {}))  # type: ignore[arg-type]
        super().__init__(backend, **settings)  # type: ignore[arg-type]
        assert self.engine.encoder is not None
        self.encoder = self.engine.encoder
        self.encoder.has_thread = False

    def ask(self, task_id: int, text: str, **options: object) -> None:
        prompt = prompt_of(text, self.projector)
        task = Task(task_id, prompt, GenerationParams(**options))
        self.engine.check(task)
        self.engine.submit(task)

    def go(self) -> None:
        """Step and encode until there is nothing to do."""
        for _ in range(10_000):
            if not self.step() and not self.encoder.encode_next():
                return
        raise AssertionError("the engine does not come to an end")

    def go_until_encoding(self) -> None:
        """Step as long as there is something to do without the encoder."""
        while self.step():
            pass


@pytest.mark.parametrize(("is_causal", "n_positions"), [(True, 2), (False, 5)])
def test_a_prompt_with_media_is_answered(is_causal: bool, n_positions: int) -> None:
    one = MediaHarness(ScriptedProjector(is_causal=is_causal, n_positions=n_positions))
    one.ask(1, "see [image:x] and [image:y]!", return_progress=True)
    one.ask(2, "[image:x]")
    one.go()
    assert one.text(1) == "SEE [IMAGE:X] AND [IMAGE:Y]!"
    assert one.text(2) == "[IMAGE:X]"
    assert one.projector.encoded == ["x", "y"]
    assert one.finish(1).timings.prompt_n == len("see  and !") + 2 * 5


def test_a_text_that_comes_back_from_ram_needs_no_encoding() -> None:
    fields = {"n_slots": 1, "n_ctx": 100}
    one = MediaHarness(ScriptedProjector(n_cells=40, n_positions=2), fields, cache_ram=10_000)
    one.encoder.limit = 0
    one.ask(1, "this [image:x]", max_tokens=2)
    one.go()
    one.ask(2, "a" * 80, max_tokens=2)
    one.go()
    one.ask(3, "this [image:x] again", max_tokens=2)
    one.go()
    assert one.projector.encoded == ["x"]
    assert one.finish(3).timings.cache_n == len("this ") + 40


def test_streams_go_on_while_an_image_is_encoded() -> None:
    one = MediaHarness()
    one.ask(1, "a stream of letters")
    one.step()
    one.ask(2, "see [image:x]")
    for _ in range(8):
        before = len(one.text(1))
        one.step()
        assert len(one.text(1)) == before + 1
    slots = one.engine.status().slots
    assert [slot.encoding for slot in slots] == [False, True]
    assert slots[1].n_past == len("see ")
    one.go()
    assert one.text(2) == "SEE [IMAGE:X]"


@pytest.mark.parametrize("is_causal", [True, False])
def test_a_stream_has_a_token_between_two_steps_with_media(is_causal: bool) -> None:
    one = MediaHarness(ScriptedProjector(n_cells=60, is_causal=is_causal))
    one.ask(1, "a stream of letters that is long enough")
    one.step()
    one.ask(2, "".join(f"[image:{i}]" for i in range(5)), max_tokens=1)
    one.step()
    while one.encoder.encode_next():
        pass
    steps = []
    while not one.events[2]:
        n_said, n_cells = len(one.text(1)), one.backend.n_decoded
        one.step()
        steps.append((len(one.text(1)) - n_said, one.backend.n_decoded - n_cells > 1))
    assert (0, True) in steps
    assert all(before != (0, True) or after[0] for before, after in pairwise(steps))


class _Recorder(PrefillPriority):
    """Notes the observations of a strategy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int]] = []

    def observe(self, n_prefill: int, n_decode: int, seconds: float) -> None:
        assert seconds > 0
        self.seen.append((n_prefill, n_decode))


def test_a_step_with_media_and_that_of_the_streams_are_one_to_the_strategy() -> None:
    one, strategy = MediaHarness(), _Recorder()
    one.engine._strategy = one.engine._scheduler.planner._strategy = strategy
    one.ask(1, "a stream")
    one.ask(2, "[image:x][image:y]", max_tokens=1)
    one.go_until_encoding()
    assert strategy.seen == [(8, 0)]
    one.ask(3, "another")
    one.step()
    assert strategy.seen[1:9] == [(0, 1)] * 8, "steps without prompts, now that there is one"
    strategy.seen.clear()
    while one.encoder.encode_next():
        pass
    one.go()
    assert strategy.seen[:2] == [(5, 1), (5, 1)]


def test_texts_and_media_take_turns() -> None:
    one = MediaHarness(ScriptedProjector(n_cells=60), {"n_slots": 2})
    one.ask(1, "".join(f"[image:{i}]" for i in range(4)), max_tokens=1)
    one.ask(2, "t" * 200, max_tokens=1)
    one.step()
    while one.encoder.encode_next():
        pass
    held = []
    for _ in range(6):
        one.step()
        held.append([slot.n_past for slot in one.engine.status().slots])
    gains = [(b[0] > a[0], b[1] > a[1]) for a, b in pairwise(held)]
    assert all(a != b for a, b in gains), "one of them in each step"
    assert (True, False) in gains[:2] and (False, True) in gains[:2]


# -- what ends early


def test_a_cancel_while_encoding_ends_it_and_frees_the_slot() -> None:
    one = MediaHarness(fields={"n_slots": 1})
    one.ask(1, "see [image:x]")
    one.ask(2, "text")

    def cancel(chunk: MediaChunk) -> None:
        one.engine.cancel(1)
        one.step()
        assert one.projector.is_interrupted
        assert one.engine.status().slots[0].task_id == 2

    one.go_until_encoding()
    one.projector.on_encode = cancel
    one.encoder.encode_next()
    one.go()
    assert one.text(2) == "TEXT"
    assert one.projector.encoded == [] and one.projector.n_interrupted == 1


def test_a_failure_ends_only_the_requests_that_need_the_image() -> None:
    one = MediaHarness(fields={"n_slots": 3})
    one.projector.fail_next = EncodeError("cannot encode")
    one.ask(1, "see [image:x]")
    one.ask(2, "text")
    one.ask(3, "look at [image:x]")
    one.go()
    assert one.text(2) == "TEXT"
    for task_id in (1, 3):
        last = one.events[task_id][-1]
        assert isinstance(last, Failed) and isinstance(last.error, EncodeError)
    one.ask(4, "see [image:x]")
    one.go()
    assert one.text(4) == "SEE [IMAGE:X]"


def test_an_unexpected_error_is_an_encode_error() -> None:
    one = MediaHarness()

    def fail(_chunk: MediaChunk) -> None:
        raise ZeroDivisionError

    one.projector.on_encode = fail
    one.ask(1, "see [image:x]")
    one.go()
    last = one.events[1][-1]
    assert isinstance(last, Failed) and isinstance(last.error, EncodeError)
    assert isinstance(last.error.__cause__, ZeroDivisionError)


def test_a_full_context_ends_an_output_with_media() -> None:
    one = MediaHarness(fields={"n_ctx": 64}, context_shift=True)
    one.ask(1, "see [image:x]" + "!" * 50)
    one.go()
    assert one.finish(1).reason is FinishReason.LIMIT and one.finish(1).truncated


# -- to a file and back


@pytest.mark.parametrize(
    ("text", "n_positions"), [("see [image:x] and [image:y]!", 2), ("[image:x]", 5)]
)
def test_a_saved_text_with_media_is_neither_encoded_nor_decoded_again(
    text: str, n_positions: int
) -> None:
    one = MediaHarness(ScriptedProjector(n_positions=n_positions), fields={"n_slots": 1})
    one.ask(1, text)
    one.go()
    saved = one.engine.save_slot(0, "")
    assert one.engine.erase_slot(0, "") == len(saved.keys)
    one.engine.restore_slot(0, saved)
    one.projector.encoded.clear()
    one.ask(2, text + one.text(1) + " more", max_tokens=1)
    one.go()
    assert one.finish(2).timings.cache_n >= len(saved.keys) - 1
    assert one.projector.encoded == []


def test_a_text_that_another_run_continues_with_media_is_not_saved_meanwhile() -> None:
    one = MediaHarness(ScriptedProjector(n_cells=20), fields={"n_slots": 2, "n_batch": 8})
    one.ask(1, "see", max_tokens=1)
    one.go()
    one.ask(2, "see" + one.text(1) + "[image:x]")
    while not (saving := one.engine.status().slots[1]).n_past > len("see") + 1:
        if not one.step():
            one.encoder.encode_next()
    assert saving.task_id == 2
    with pytest.raises(UnavailableError, match="try again"):
        one.engine.save_slot(0, "")
    one.go()
    assert one.engine.save_slot(0, "").keys


# -- what is refused


def test_a_model_without_a_projector_refuses_media() -> None:
    prompt = prompt_of("see [image:x]", ScriptedProjector())
    engine = Harness().engine
    with pytest.raises(InvalidRequestError, match="text only"):
        engine.check(Task(1, prompt, GenerationParams()))


# -- what others see of it


class _Reader:
    """A drafter that notes what it is shown."""

    name, is_free, step_s, n_max = "reader", True, 0.0, 4

    def __init__(self) -> None:
        self.seen: list[list[int]] = []

    def propose(self, requests: Sequence[DraftRequest]) -> list[Sequence[int]]:
        self.seen += [list(one.keys) for one in requests]
        return [() for _ in requests]

    def forget(self, slot_id: int) -> None:
        pass

    def close(self) -> None:
        pass


def test_drafters_see_text_only() -> None:
    reader = _Reader()
    one = MediaHarness(fields={"drafters": [reader]})
    one.ask(1, "see [image:x]!", max_tokens=4)
    one.go()
    assert bytes(reader.seen[0]) == b"see !S"


def test_an_engine_sleeps_while_the_encoder_works_in_its_thread() -> None:
    projector = ScriptedProjector()
    one = Harness(ScriptedBackend(projector=projector))
    one.engine.start_helpers()
    projector.gate.clear()
    prompt = prompt_of("see [image:x]", projector)
    one.engine.submit(Task(1, prompt, GenerationParams()))
    while one.step():
        pass
    assert one.engine.status().slots[0].encoding
    projector.gate.set()
    while one.engine.status().slots[0].encoding:
        one.engine.step(wait=True)  # the encoder wakes it up
    while one.step():
        pass
    assert one.text(1) == "SEE [IMAGE:X]"
    one.engine.stop()
    one.engine.run()
