"""An engine on a model that llama.cpp runs, stepping by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs

from tests.support.engine_events import take_events
from trioserve import llama
from trioserve.config import Config
from trioserve.engine import DecodeMaximal, DiskCache, Engine
from trioserve.types import (
    Chunk,
    Failed,
    Finished,
    GenerationParams,
    Prompt,
    PromptScores,
    SamplingParams,
    Task,
)
from trioserve.types.task import shared_length

#: A difference of two logits that rounding may turn around.
NEAR_TIE = 0.2

GREEDY = SamplingParams(temperature=0.0)


class Bench:
    """An engine, and what it has said to each task. The bundled model, if none is named."""

    def __init__(self, cache_ram: int = 0, disk: Path | None = None, **config: object) -> None:
        self.backend = llama.load(Config(threads=1, **config))
        identify, cuttable = self.backend.state_identity, self.backend.cuttable
        self.engine = Engine(
            self.backend,
            DecodeMaximal(),
            lambda: None,
            cache_ram=cache_ram,
            disk=None if disk is None else DiskCache(disk, 2**30, identify, cuttable=cuttable),
        )
        if disk is not None:
            self.engine.start_helpers()
        self.tokens: dict[int, list[int]] = {}
        self.finished: dict[int, Finished] = {}
        self.margins: list[float] = []
        self.scores: dict[int, PromptScores] = {}

    def submit(
        self,
        task_id: int,
        prompt: str | Sequence[int],
        n: int = 24,
        divergence_points: Sequence[int] = (),
        **options: object,
    ) -> None:
        options.setdefault("sampling", GREEDY)
        tokens = self.backend.vocab.tokenize(prompt) if isinstance(prompt, str) else tuple(prompt)
        self.tokens[task_id] = []
        constraint = options.pop("constraint", None)
        params = GenerationParams(max_tokens=n, **options)
        made = Prompt(tokens, divergence_points=divergence_points)
        self.engine.submit(Task(task_id, made, params, constraint=constraint))

    def step(self) -> bool:
        work_left = self.engine.step()
        self.engine.check_integrity()
        for event in take_events(self.engine):
            assert not isinstance(event, Failed), event
            if isinstance(event, Chunk):
                self.tokens[event.task_id] += event.tokens
                if event.scores is not None:
                    self.scores[event.task_id] = event.scores
                self.margins += [p.top[0].logprob - p.top[1].logprob for p in event.probs]
            elif isinstance(event, Finished):
                self.finished[event.task_id] = event
        return work_left

    def run(self) -> None:
        while self.step():
            pass

    def alone(self, prompt: str | Sequence[int], n: int = 24, **options: object) -> Alone:
        self.margins.clear()
        self.submit(0, prompt, n, cache_prompt=False, n_probs=2, **options)
        self.run()
        return Alone(self.tokens.pop(0), list(self.margins))


@attrs.frozen
class Alone:
    """The output of a prompt alone, and the certainty of each token (in logits)."""

    tokens: list[int]
    margins: list[float]

    def is_said_by(self, tokens: list[int]) -> bool:
        """True if another output is the same, up to the first token that was a near tie.

        The shape of a batch changes the rounding of floats. Where two tokens are as good as equal
        that decides, and what follows is another text.
        """
        n = shared_length(self.tokens, tokens)
        return n == len(self.tokens) == len(tokens) or self.margins[n] < NEAR_TIE
