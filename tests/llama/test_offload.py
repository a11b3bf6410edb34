"""Sampling within the decode: the same tokens as on the CPU, whoever else is in the batch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from tests.support.llama_bench import GREEDY, Bench
from trioserve.config import Config
from trioserve.errors import ConfigError
from trioserve.llama import LlamaBackend
from trioserve.types import Grammar, SamplingParams

PROMPTS = ("Once upon a time", "The little dog ran", "In the garden there was", "A boy named Tim")
HOT = SamplingParams(temperature=1.2, seed=11)


@pytest.fixture(scope="module")
def here() -> Iterator[Bench]:
    bench = Bench(parallel=4, ctx_size=2048)
    yield bench
    bench.backend.close()


@pytest.fixture(scope="module")
def device() -> Iterator[Bench]:
    bench = Bench(parallel=4, ctx_size=2048, backend_sampling=True)
    yield bench
    bench.backend.close()


def n_on_device(bench: Bench) -> int:
    assert isinstance(bench.backend, LlamaBackend)
    return sum(sampler._seq is not None for sampler in bench.backend._samplers)


def together(bench: Bench, sampling: SamplingParams, **options: object) -> list[list[int]]:
    for i, prompt in enumerate(PROMPTS):
        bench.submit(i, prompt, sampling=sampling, cache_prompt=False, **options)
    bench.run()
    return [bench.tokens[i] for i in range(len(PROMPTS))]


@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        HOT,
        SamplingParams(seed=3),
        SamplingParams(seed=4, top_k=0, top_p=1.0, min_p=0.0),
        SamplingParams(seed=5, repeat_penalty=1.3, frequency_penalty=0.2),
        SamplingParams(seed=6, logit_bias=((300, 3.0), (301, -1.0)), ignore_eos=True),
    ],
)
def test_the_tokens_are_those_of_the_cpu(
    here: Bench, device: Bench, sampling: SamplingParams
) -> None:
    for bench in (here, device):
        bench.submit(9, PROMPTS[0], sampling=sampling)
        for _ in range(5):
            bench.step()
    assert (n_on_device(here), n_on_device(device)) == (0, 1)
    expected = together(here, sampling)
    assert together(device, sampling) == expected
    assert device.tokens[9] == here.tokens[9]
    assert n_on_device(device) == 0


@pytest.mark.parametrize(
    ("sampling", "reason"),
    [
        (SamplingParams(seed=7, mirostat=2), "mirostat-v2"),
        (SamplingParams(seed=8, xtc_probability=0.5), "xtc"),
    ],
)
def test_samplers_that_the_device_has_not_are_run_on_the_cpu(
    here: Bench, device: Bench, sampling: SamplingParams, reason: str
) -> None:
    with capture_logs() as logs:
        assert together(device, sampling) == together(here, sampling)
    told = [log["reason"] for log in logs if "sampled on the CPU" in log["event"]]
    assert told == [reason]
    assert n_on_device(device) == 0


@pytest.mark.system
def test_what_needs_the_logits_is_sampled_on_the_cpu(here: Bench, device: Bench) -> None:
    for bench in (here, device):  # the same batches, so that rounding is the same
        constraint = bench.backend.compile(Grammar("regex", "[a-z ]{5,20}"))
        options = {"sampling": HOT, "cache_prompt": False}
        bench.submit(1, PROMPTS[0], n_probs=2, **options)
        bench.submit(2, PROMPTS[1], constraint=constraint, **options)
        bench.submit(3, PROMPTS[2], **options)
        for _ in range(4):
            bench.step()
        assert n_on_device(bench) == (1 if bench is device else 0)
        bench.run()
    assert [device.tokens[i] for i in (1, 2, 3)] == [here.tokens[i] for i in (1, 2, 3)]


def test_a_request_goes_on_as_it_was_after_a_pause_and_a_preemption(device: Bench) -> None:
    device.submit(1, PROMPTS[0], 40, sampling=HOT, cache_prompt=False)
    device.run()
    alone = device.tokens[1]
    device.submit(1, PROMPTS[0], 40, sampling=HOT, cache_prompt=False)
    device.submit(2, PROMPTS[1], 40, sampling=HOT)
    for _ in range(8):
        device.step()
    device.engine.pause(2)
    device.engine.cancel(3)
    for _ in range(4):
        device.step()
    scheduler = device.engine._scheduler
    slot = next(slot for slot in scheduler.slots if slot.request and slot.request.task.id == 1)
    scheduler.preempt(slot)
    assert n_on_device(device) == 1
    device.engine.resume(2)
    for _ in range(3):
        device.step()
    assert n_on_device(device) == 2
    device.run()
    assert device.tokens[1] == alone


def test_a_cancel_gives_the_sequence_back(device: Bench) -> None:
    device.submit(1, PROMPTS[0], 40, sampling=HOT)
    for _ in range(3):
        device.step()
    device.engine.cancel(1)
    device.step()
    assert n_on_device(device) == 0
    assert len(together(device, GREEDY)[0]) > 0


def test_drafts_and_embeddings_exclude_it() -> None:
    for field in ({"spec_type": ("ngram-simple",)}, {"embeddings": True}):
        with pytest.raises(ConfigError, match="backend_sampling"):
            Config(backend_sampling=True, **field)
