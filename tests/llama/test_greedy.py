"""The greedy output equals that of a loop written directly against llama.cpp's C API."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
from llama_cpp import llama_cpp

from trioserve import llama
from trioserve.config import Config
from trioserve.engine import Engine, PrefillPriority
from trioserve.llama import LlamaBackend
from trioserve.models import BUNDLED
from trioserve.types import Chunk, GenerationParams, Prompt, SamplingParams, Task

N_PREDICT = 48
PROMPTS = (
    "Hello",
    "<|im_start|>user\nCount from 1 to 10<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nRepeat: blue lamp seven<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTell me a story.<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time",
    '{"name": "',
    "2 + 3 =",
    "日本語 naïve 🦊",
    "word " * 300,
)


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    with llama.load(Config(threads=1, ctx_size=1024, parallel=1)) as backend:
        yield backend


@pytest.fixture(scope="module")
def plain(backend: LlamaBackend) -> Iterator[tuple[Any, Any]]:
    """A model and a context made with nothing but the C API; `backend` quiets its log."""
    model = llama_cpp.llama_model_load_from_file(
        str(BUNDLED).encode(), llama_cpp.llama_model_default_params()
    )
    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 1024, 2048, 512
    params.n_threads = params.n_threads_batch = 1
    params.kv_unified = True
    context = llama_cpp.llama_init_from_model(model, params)
    yield model, context
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)


def plain_greedy(model: Any, context: Any, prompt: str) -> list[int]:
    vocab = llama_cpp.llama_model_get_vocab(model)
    data = prompt.encode()
    tokens = (ctypes.c_int32 * (len(data) + 8))()
    n = llama_cpp.llama_tokenize(vocab, data, len(data), tokens, len(tokens), True, True)
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(context), True)
    sampler = llama_cpp.llama_sampler_init_greedy()
    batch = llama_cpp.llama_batch_get_one(tokens, n)
    one, out = (ctypes.c_int32 * 1)(), []
    for _ in range(N_PREDICT):
        assert llama_cpp.llama_decode(context, batch) == 0
        token = llama_cpp.llama_sampler_sample(sampler, context, -1)
        out.append(token)
        if llama_cpp.llama_vocab_is_eog(vocab, token):
            break
        one[0] = token
        batch = llama_cpp.llama_batch_get_one(one, 1)
    llama_cpp.llama_sampler_free(sampler)
    return out


def our_greedy(backend: LlamaBackend, prompt: str) -> list[int]:
    tokens = backend.vocab.tokenize(prompt, add_special=True)
    batch, pos, out = backend.batch, len(tokens), []
    backend.seq_rm(0, 0)
    batch.clear()
    row = batch.extend(tokens, 0, 0)
    batch.want_logits(row)
    with backend.sampler(SamplingParams(temperature=0), tokens) as sampler:
        for _ in range(N_PREDICT):
            backend.decode()
            token = sampler.sample(row)
            out.append(token)
            if token in backend.vocab.end_of_generation:
                break
            batch.clear()
            row = batch.add(token, pos, 0, logits=True)
            pos += 1
    return out


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy_output_equals_the_plain_loop(
    backend: LlamaBackend, plain: tuple[Any, Any], prompt: str
) -> None:
    expected = plain_greedy(*plain, prompt)
    assert our_greedy(backend, prompt) == expected
    assert our_greedy(backend, prompt) == expected  # and again, in a cache that was used


def test_the_engine_says_the_same(backend: LlamaBackend, plain: tuple[Any, Any]) -> None:
    engine = Engine(backend, PrefillPriority(), lambda: None)  # one batch a prompt, as the loop
    options = GenerationParams(
        max_tokens=N_PREDICT, sampling=SamplingParams(temperature=0.0), cache_prompt=False
    )
    for i, prompt in enumerate(PROMPTS):
        engine.submit(Task(i, Prompt(backend.vocab.tokenize(prompt, add_special=True)), options))
    while engine.tick():
        engine.check_integrity()
    said: dict[int, list[int]] = {}
    for event in engine.take_events():
        if isinstance(event, Chunk):
            said.setdefault(event.task_id, []).extend(event.tokens)
    assert [said[i] for i in range(len(PROMPTS))] == [plain_greedy(*plain, p) for p in PROMPTS]


def test_ten_prompts() -> None:
    assert len(PROMPTS) == 10
