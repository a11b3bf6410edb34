"""Prompts with media: what is encoded, when it is decoded, and what is used again."""

from __future__ import annotations

import pytest

from tests.support.engine_harness import Harness
from tests.support.scripted_media import prompt_of
from trioserve.testing import ScriptedBackend, ScriptedProjector
from trioserve.types import GenerationParams, Task


class MediaHarness(Harness):
    """An engine with a scripted projector, which encodes when it is told to."""

    def __init__(self, projector: ScriptedProjector | None = None, **settings: object) -> None:
        self.projector = projector or ScriptedProjector()
        fields = {name: settings.pop(name) for name in ("n_slots", "can_cut") if name in settings}
        super().__init__(ScriptedBackend(projector=self.projector, **fields), **settings)  # type: ignore[arg-type]
        assert self.engine.encoder is not None
        self.encoder = self.engine.encoder
        self.encoder.has_thread = False

    def ask(self, task_id: int, text: str, **options: object) -> None:
        self.engine.submit(
            Task(task_id, prompt_of(text, self.projector), GenerationParams(**options))
        )

    def go(self) -> None:
        """Tick and encode until there is nothing to do."""
        for _ in range(1000):
            if not self.tick() and not self.encoder.encode_next():
                return
        raise AssertionError("the engine does not come to an end")


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("n_positions", [5, 2])
def test_a_prompt_with_media_is_answered(is_causal: bool, n_positions: int) -> None:
    one = MediaHarness(ScriptedProjector(is_causal=is_causal, n_positions=n_positions))
    one.ask(1, "see [image:x] and [image:y]!")
    one.ask(2, "[image:x]")
    one.go()
    assert one.text(1) == "SEE [IMAGE:X] AND [IMAGE:Y]!"
    assert one.text(2) == "[IMAGE:X]"
    assert one.projector.encoded == ["x", "y"]
