"""The engine on the bundled model: what llama.cpp does must not depend on who else is there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.llama_bench import Bench
from trioserve.types import SamplingParams

PROMPTS = [
    "<|im_start|>user\nCount from 1 to 10<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTell me a story<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time",
    "The capital of Italy is",
    "1 2 3 4 5 6",
    "a",
    "<|im_start|>system\nYou are brief.<|im_end|>\n<|im_start|>user\nWho are you?<|im_end|>\n",
    "Ünïcödé, 😀 and\n\n\ttabs",
]


@pytest.fixture
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(**getattr(request, "param", {}))
    yield bench
    bench.backend.close()


KINDS = pytest.mark.parametrize(
    "bench",
    [{"kv_unified": True}, {"kv_unified": False, "ctx_size": 4096}],
    ids=["unified", "split"],
    indirect=True,
)


@KINDS
def test_in_company_the_output_is_what_it_is_alone(bench: Bench) -> None:
    alone = [bench.alone(prompt) for prompt in PROMPTS]
    for i, prompt in enumerate(PROMPTS, 1):
        bench.submit(i, prompt)
    bench.run()
    assert all(said.is_said_by(bench.tokens[i]) for i, said in enumerate(alone, 1))


@KINDS
def test_with_the_cache_the_output_is_what_it_is_without(bench: Bench) -> None:
    system = "<|im_start|>system\n" + "Be brief and friendly. " * 12 + "<|im_end|>\n"
    prompts = [system + prompt for prompt in PROMPTS[:6]]
    alone = [bench.alone(prompt) for prompt in prompts]
    for i, prompt in enumerate(prompts, 1):
        bench.submit(i, prompt)
    bench.run()
    assert all(said.is_said_by(bench.tokens[i]) for i, said in enumerate(alone, 1))
    assert sum(bench.finished[i].timings.cache_n > 40 for i in range(1, len(prompts) + 1)) >= 5


@KINDS
def test_followers_start_from_the_one_that_leads(bench: Bench) -> None:
    shared = "This is a long text that many requests begin with. " * 8
    n_shared = len(bench.backend.vocab.tokenize(shared))
    for i in range(1, 5):
        bench.submit(i, shared + f" And this is number {i}.")
    bench.run()
    prefilled = [bench.finished[i].timings.prompt_n for i in range(1, 5)]
    assert max(prefilled) >= n_shared
    assert sum(prefilled) < n_shared + 4 * 20


@pytest.mark.parametrize(
    "bench", [{"ctx_size": 512, "parallel": 3, "cache_ram": 2**24}], indirect=True
)
def test_a_preempted_run_goes_on_as_if_nothing_had_happened(bench: Bench) -> None:
    alone = [bench.alone(prompt, 200, sampling=_endless()) for prompt in PROMPTS[:3]]
    for i in range(3):
        bench.submit(i + 1, PROMPTS[i], 200, sampling=_endless())
    preempted = False
    while bench.tick():
        status = bench.engine.status()
        preempted = preempted or bool(status.waiting)
    assert preempted
    assert all(said.is_said_by(bench.tokens[i]) for i, said in enumerate(alone, 1))


def _endless() -> SamplingParams:
    return SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    "bench", [{"ctx_size": 512, "parallel": 1, "cache_seqs": 0, "cache_ram": 2**24}], indirect=True
)
def test_what_left_the_cache_comes_back_from_ram(bench: Bench) -> None:
    long = "A text of some length, which is worth keeping around. " * 6
    alone = bench.alone(long)
    bench.submit(1, long)
    bench.run()
    bench.submit(2, "Something else entirely. " * 12)
    bench.run()
    bench.submit(3, long)
    bench.run()
    assert bench.finished[3].timings.prompt_n < 5
    assert alone.is_said_by(bench.tokens[3])


def test_a_cancel_in_prefill_and_decode_leaves_the_cache_right(bench: Bench) -> None:
    bench.submit(1, "word " * 900)
    bench.submit(2, PROMPTS[0])
    bench.engine.cancel(1)
    bench.tick()
    bench.submit(3, PROMPTS[2])
    bench.tick()
    bench.tick()
    bench.engine.cancel(3)
    bench.run()
    assert bench.alone(PROMPTS[0]).is_said_by(bench.tokens[2])


@pytest.mark.parametrize("bench", [{"parallel": 1, "cache_seqs": 7}], indirect=True)
@pytest.mark.parametrize("n_right", [1, 3])
def test_drafts_change_nothing_but_the_number_of_ticks(bench: Bench, n_right: int) -> None:
    alone = bench.alone(PROMPTS[0])
    counters = bench.engine.status().counters
    bench.submit(1, PROMPTS[0])
    scheduler = bench.engine._scheduler
    while bench.tick():
        for slot in scheduler.slots:
            if slot.in_decode:
                n_said = len(bench.tokens[1])
                draft = [*alone.tokens[n_said : n_said + n_right], 5]  # 5: wrong
                scheduler.propose([(slot, draft)])
    assert alone.is_said_by(bench.tokens[1])
    n_decodes = bench.engine.status().counters.decodes - counters.decodes
    assert n_decodes <= 2 + len(alone.tokens) // (n_right + 1)
