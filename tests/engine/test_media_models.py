"""Tiny models with eyes say the same alone and beside others, also when these are cancelled."""

from __future__ import annotations

from pathlib import Path
from time import sleep

import numpy as np
import pytest

from tests.support.llama_bench import Alone, Bench
from tests.support.media_models import random_image, random_sound, write_pair
from tests.support.plain_loop import EXACT
from trioserve.types import DecodedMedia, GenerationParams, Prompt, SamplingParams, Task

N = 10


class MediaBench(Bench):
    """An engine on a model with a projector."""

    def prepare(self, parts: list[str | DecodedMedia]) -> Prompt:
        assert self.backend.projector is not None
        return self.backend.projector.prepare(parts, add_special=True)

    def ask(self, task_id: int, prompt: Prompt, **options: object) -> None:
        self.tokens[task_id] = []
        sampling = SamplingParams(temperature=0.0)
        params = GenerationParams(max_tokens=N, sampling=sampling, **options)  # type: ignore[arg-type]
        self.engine.submit(Task(task_id, prompt, params))

    def go(self, task_ids: list[int]) -> None:
        """Step until these have ended; in between, the encoder has its time."""
        while not all(task_id in self.finished for task_id in task_ids):
            if not self.step():
                sleep(0.001)


def prompts_of(bench: MediaBench, kind: str) -> list[Prompt]:
    """Prompts with the same image at different places, and text before it that some share."""
    x: DecodedMedia = random_image(60, 60)
    y: DecodedMedia = random_sound(1.5) if kind == "mixed" else random_image(100, 40, seed=1)
    system = "ba du ke mi lo sa te no ri fu ga po " * 3
    parts: list[list[str | DecodedMedia]] = [
        [x, "what is this"],
        [system, x, "what is this"],
        [system, x, "what is this", y, "and that"],
        [system, y],
        [system, "text only"],
        [x, x, "twice"],
    ]
    return [bench.prepare(one) for one in parts]


@pytest.mark.parametrize(
    ("kind", "unified"), [("gemma3", True), ("qwen2vl", False), ("mixed", True)]
)
def test_company_cancels_and_caches_change_no_output(
    tmp_path: Path, kind: str, unified: bool
) -> None:
    pair = write_pair(tmp_path, kind)
    settings = {**pair.settings, **EXACT, "ctx_size": 2048, "parallel": 4, "batch_size": 64}
    bench = MediaBench(cache_ram=1 << 24, kv_unified=unified, **settings)
    bench.engine.start_helpers()
    rng = np.random.default_rng(2 + unified)
    try:
        prompts, alone = prompts_of(bench, kind), []
        for prompt in prompts:
            bench.margins.clear()
            bench.ask(0, prompt, cache_prompt=False, n_probs=2)
            bench.go([0])
            bench.finished.clear()
            alone.append(Alone(bench.tokens.pop(0), list(bench.margins)))
        which, running = {}, []
        for task_id in range(1, 31):
            which[task_id] = int(rng.integers(len(prompts)))
            bench.ask(task_id, prompts[which[task_id]])
            running.append(task_id)
            for _ in range(rng.integers(6)):
                bench.step()
            if rng.random() < 0.3:
                bench.engine.cancel(running.pop(rng.integers(len(running))))
        bench.go(running)
        for task_id in running:
            assert alone[which[task_id]].is_said_by(bench.tokens[task_id])
        reused = sum(one.timings.cache_n > 0 for one in bench.finished.values())
        assert reused >= len(bench.finished) // 3
    finally:
        bench.engine.stop()
        bench.engine.run()
