"""An engine on llama.cpp, ticking by hand, for tests of grammars."""

from __future__ import annotations

from typing import Any

from trioserve.engine import DecodeMaximal, Engine
from trioserve.llama import LlamaBackend
from trioserve.types import (
    Chunk,
    Failed,
    Finished,
    FinishReason,
    GenerationParams,
    Grammar,
    Prompt,
    SamplingParams,
    Task,
)

PROMPT = "Once upon a time"


GREEDY = SamplingParams(temperature=0.0)


class Bench:
    """An engine ticking by hand. It does not own the backend."""

    def __init__(self, backend: LlamaBackend) -> None:
        self.backend = backend
        self.engine = Engine(backend, DecodeMaximal(), lambda: None)
        self.text: dict[int, str] = {}
        self.tokens: dict[int, list[int]] = {}
        self.probs: dict[int, list[Any]] = {}
        self.ends: dict[int, Finished | Failed] = {}

    def submit(
        self, task_id: int, wanted: Grammar | None, prompt: str = PROMPT, **options: Any
    ) -> None:
        constraint = None if wanted is None else self.backend.compile(wanted)
        options.setdefault("max_tokens", 200)
        options.setdefault("cache_prompt", False)
        self.text[task_id], self.tokens[task_id], self.probs[task_id] = "", [], []
        task = Task(
            task_id,
            Prompt(self.backend.vocab.tokenize(prompt)),
            GenerationParams(grammar=wanted, **options),
            constraint=constraint,
        )
        self.engine.submit(task)

    def tick(self) -> bool:
        more = self.engine.tick()
        for event in self.engine.take_events():
            if isinstance(event, Chunk):
                self.text[event.task_id] += event.text
                self.tokens[event.task_id] += event.tokens
                self.probs[event.task_id] += event.probs
            elif isinstance(event, Finished | Failed):
                self.ends[event.task_id] = event
        return more

    def run(self) -> None:
        while self.tick():
            pass

    def reason(self, task_id: int) -> FinishReason:
        end = self.ends[task_id]
        assert isinstance(end, Finished), end
        return end.reason
