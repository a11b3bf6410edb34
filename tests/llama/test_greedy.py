"""The greedy output equals that of a loop written directly against llama.cpp's C API."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tests.support.engine_events import take_events
from tests.support.plain_loop import PlainLoop, plain_loop
from trioserve import llama
from trioserve.config import Config
from trioserve.engine import Engine, PrefillPriority
from trioserve.llama.backend import LlamaBackend
from trioserve.models import BUNDLED
from trioserve.types import Chunk, GenerationParams, Prompt, SamplingParams, Task

N_PREDICT = 32
PROMPTS = (
    "Hello",
    "<|im_start|>user\nCount from 1 to 10<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n",
    "日本語 naïve 🦊",
    "word " * 300,
)


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    with llama.load(Config(threads=1, ctx_size=1024, parallel=1)) as backend:
        yield backend


@pytest.fixture(scope="module")
def plain() -> Iterator[PlainLoop]:
    with plain_loop(BUNDLED) as loop:
        yield loop


def plain_greedy(plain: PlainLoop, prompt: str) -> list[int]:
    """Run the loop with the prompt in one batch, as we do."""
    return plain.greedy(plain.tokenize(prompt), N_PREDICT, n_batch=1024).tokens


def our_greedy(backend: LlamaBackend, prompt: str, threads: Sequence[int] = ()) -> list[int]:
    tokens = backend.vocab.tokenize(prompt, add_special=True)
    batch, pos, out = backend.batch, len(tokens), []
    backend.memory.remove(0, 0)
    batch.clear()
    row = batch.extend(tokens, 0, 0)
    batch.want_logits(row)
    with backend.sampler(SamplingParams(temperature=0), tokens) as sampler:
        for i in range(N_PREDICT):
            if threads:
                backend.set_threads(threads[i % len(threads)])
            backend.decode()
            token = sampler.sample(row)
            out.append(token)
            if token in backend.vocab.end_of_generation:
                break
            batch.clear()
            row = batch.add(token, pos, 0, logits=True)
            pos += 1
    return out


def test_threads_that_change_with_every_step_make_no_difference(
    backend: LlamaBackend, plain: PlainLoop
) -> None:
    prompt = PROMPTS[2]
    assert our_greedy(backend, prompt, threads=(2, 1, 3, 1)) == plain_greedy(plain, prompt)


def test_the_engine_says_the_same(backend: LlamaBackend, plain: PlainLoop) -> None:
    engine = Engine(backend, PrefillPriority(), lambda: None)  # one batch a prompt, as the loop
    options = GenerationParams(
        max_tokens=N_PREDICT, sampling=SamplingParams(temperature=0.0), cache_prompt=False
    )
    for i, prompt in enumerate(PROMPTS):
        engine.submit(Task(i, Prompt(backend.vocab.tokenize(prompt, add_special=True)), options))
    while engine.step():
        engine.check_integrity()
    said: dict[int, list[int]] = {}
    for event in take_events(engine):
        if isinstance(event, Chunk):
            said.setdefault(event.task_id, []).extend(event.tokens)
    assert [said[i] for i in range(len(PROMPTS))] == [plain_greedy(plain, p) for p in PROMPTS]
