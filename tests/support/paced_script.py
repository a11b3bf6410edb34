"""A scripted model whose answers a test chooses, slows down and holds."""

from __future__ import annotations

import threading
import time
from typing import Any

import attrs

from tests.support.scripts import answering
from tests.support.waiting import PATIENCE
from trioserve.testing import ScriptedBackend

#: More than any text of a test, in tokens.
_CONTEXT = 1 << 20


class PacedScript:
    """The answers of the model, and their timing.

    Attributes:
        answer: the answer to every further prompt.
        seconds_a_token: the time of a step.
        seconds_a_prompt_token: the additional time of a step for each prompt token in it.
        prompts: the prompts so far.
    """

    def __init__(self) -> None:
        self.reset()
        self._held_at = b""
        self._may_go_on = threading.Event()
        self._may_go_on.set()

    def reset(self) -> None:
        """Restore the initial state: answer at once."""
        self.answer = "It works."
        self.seconds_a_token = 0.0
        self.seconds_a_prompt_token = 0.0
        self.prompts: list[str] = []

    def backend(self, name: str = "scripted", **settings: Any) -> ScriptedBackend:
        """Make a backend that gives the answers, as a model of that name."""
        sizes = {"n_slots": 4, "n_ctx": 4 * _CONTEXT, "n_ctx_seq": _CONTEXT, "n_batch": 2048}
        backend = answering(self._say, **(sizes | settings))
        backend.info = attrs.evolve(backend.info, name=name)
        backend.on_decode = self._wait
        return backend

    def _say(self, prompt: str) -> str:
        self.prompts.append(prompt)
        return self.answer

    def _wait(self, backend: ScriptedBackend) -> None:
        n_read = sum(not wants_logits for *_, wants_logits in backend.batch.rows)
        time.sleep(self.seconds_a_token + self.seconds_a_prompt_token * n_read)
        # Only what is decoded now: a sequence that is kept from before may end in the same way.
        seqs = {seq for _, _, seq, _ in backend.batch.rows}
        if self._held_at and any(self._has_come_to_it(backend.sequences[seq]) for seq in seqs):
            self._may_go_on.wait(PATIENCE)

    def _has_come_to_it(self, tokens: list[int]) -> bool:
        return bytes(token & 0xFF for token in tokens[-len(self._held_at) :]) == self._held_at

    def hold_at(self, text: str) -> None:
        """Stop the model when its output ends with `text`, until `go_on` is called."""
        self._held_at = text.encode()
        self._may_go_on.clear()

    def go_on(self) -> None:
        """Let the model continue, without further stops."""
        self._held_at = b""
        self._may_go_on.set()
