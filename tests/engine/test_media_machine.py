"""Random arrivals, cancels and failures of prompts with media: the invariants hold all the time."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import rule

from tests.engine.test_scheduler import SPLIT, CheckpointMachine, EngineMachine, run_machine
from tests.support.scripted_media import prompt_of
from trioserve.engine.encoder import MediaEncoder, needs
from trioserve.errors import EncodeError
from trioserve.testing import ScriptedProjector
from trioserve.types import Failed, MediaChunk, Prompt


class MediaMachine(EngineMachine):
    """The same with an image in place of each ``b``, which takes more than a step.

    As with M-RoPE, an image has fewer positions than cells. Its embeddings are kept for a few
    others only. While one is encoded, the engine steps, and runs are cancelled.
    """

    n_cells, n_positions, is_causal = 18, 3, True
    has_drafters = True

    def __init__(self) -> None:
        super().__init__()
        encoder = self.engine.encoder
        assert encoder is not None
        encoder.has_thread = False
        encoder.limit = 3 * 4 * 4 * self.n_cells
        self.encoder: MediaEncoder = encoder

    def make_projector(self) -> ScriptedProjector:
        self.projector = ScriptedProjector(
            n_cells=self.n_cells, n_positions=self.n_positions, is_causal=self.is_causal
        )
        return self.projector

    def make_prompt(self, text: str, divergence_points: list[int]) -> tuple[Prompt, str]:
        seen = text.replace("bb", "bc").replace("b", "[image:b]").replace("c", "[image:c]")
        return prompt_of(seen, self.projector, tuple(divergence_points)), seen

    def waits_for_others(self) -> bool:
        slots = self.engine._scheduler.slots
        return super().waits_for_others() or any(slot.awaits_media for slot in slots)

    @rule(n_steps=st.integers(0, 3), fails=st.sampled_from([False, False, False, True]))
    def encode(self, n_steps: int, fails: bool) -> None:
        """Encode a chunk, and meanwhile step."""

        def go_on(_chunk: MediaChunk) -> None:
            for _ in range(n_steps):
                self.engine.step()
                self.engine.check_integrity()
                self._read()

        self.projector.on_encode = go_on
        self.projector.fail_next = EncodeError("as told") if fails else None
        self.encoder.encode_next()
        self.projector.on_encode = self.projector.fail_next = None

    @rule(data=st.data())
    def cancel_while_encoding(self, data: st.DataObject) -> None:
        """Cancel the run of a slot while something is encoded."""
        runs = [slot.request for slot in self.engine._scheduler.slots if slot.request is not None]
        if not runs:
            return
        task_id = data.draw(st.sampled_from(sorted(run.task.id for run in runs)))

        def cancel(chunk: MediaChunk) -> None:
            self.engine.cancel(task_id)
            self.cancelled.add(task_id)
            self.engine.step()
            self._read()
            wanted = any(needs(slot, chunk) for slot in self.engine._scheduler.slots)
            assert wanted or self.projector.is_interrupted, "an unwanted chunk is encoded"

        self.projector.on_encode = cancel
        self.encoder.encode_next()
        self.projector.on_encode = None

    def may_fail(self, event: Failed) -> bool:
        return isinstance(event.error, EncodeError)

    def help(self) -> bool:
        return self.encoder.encode_next()

    def teardown(self) -> None:
        super().teardown()
        size = sum(one.nbytes for one in self.encoder._encoded.values())
        assert size == self.encoder._size <= self.encoder.limit


class MediaCheckpointMachine(MediaMachine, CheckpointMachine):
    """The same with a model that can append, start again, or go back to a checkpoint."""

    n_cells, n_positions = 9, 2
    has_drafters = False


#: Images that are decoded whole.
WHOLE: dict[str, object] = {"n_positions": 4, "n_cells": 4, "is_causal": False}


@pytest.mark.parametrize(
    ("machine", "fields"),
    [
        (MediaMachine, {}),
        (MediaMachine, {**WHOLE, **SPLIT}),
        (MediaCheckpointMachine, {}),
        (MediaCheckpointMachine, {**WHOLE, "window": 30}),
    ],
)
def test_the_invariants_hold(machine: type[MediaMachine], fields: dict[str, object]) -> None:
    run_machine(machine, 35, **fields)
