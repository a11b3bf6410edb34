"""Sampling within the decode: the same tokens as on the CPU, alone and in company."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from tests.support.drafted import Drafted, Settings, load, plain, without_head, write_head
from tests.support.engine_events import preempt
from tests.support.llama_bench import GREEDY, Bench
from tests.support.step_costs import FlatCosts
from trioserve.config import Config
from trioserve.engine import NgramDrafter, NgramRules
from trioserve.errors import ConfigError
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.context import DRAFT_ROWS
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
    preempt(device.engine, slot)
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


def test_embeddings_exclude_it() -> None:
    with pytest.raises(ConfigError, match="backend_sampling"):
        Config(backend_sampling=True, embeddings=True)


# -- with drafts, whose rows are sampled, too


@pytest.fixture(scope="module", params=["glm4moe", "eagle3"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    return write_head(tmp_path_factory.mktemp("heads"), request.param, is_good=True)


@pytest.fixture(scope="module")
def drafted(model: Settings) -> Iterator[Drafted]:
    bench = Drafted(model, backend_sampling=True)
    yield bench
    bench.backend.close()


@pytest.mark.parametrize(
    ("sampling", "n_expected"),
    [
        (GREEDY, 3),
        (HOT, 3),
        (SamplingParams(seed=4, top_k=5), 3),
        (SamplingParams(seed=5, repeat_penalty=1.3), 0),  # penalties follow the tokens of the draft
        (SamplingParams(seed=6, logit_bias=((300, 3.0),), ignore_eos=True), 3),
    ],
)
def test_the_tokens_of_drafts_are_those_of_the_cpu(
    model: Settings, drafted: Drafted, sampling: SamplingParams, n_expected: int
) -> None:
    prompts = PROMPTS[:3]
    drafted.finished.clear()
    drafted.engine.drafts.use(drafted.backend.drafters)  # nothing is known of their guesses
    for i, prompt in enumerate(prompts):
        drafted.submit(i, prompt, 40, sampling=sampling, cache_prompt=False)
    for _ in range(3):
        drafted.step()
    assert n_on_device(drafted) == n_expected
    drafted.run()
    assert [drafted.tokens[i] for i in range(3)] == plain(model, prompts, 40, sampling=sampling)
    n_drafted = sum(end.timings.draft_n for end in drafted.finished.values())
    assert 0 < drafted.n_accepted < n_drafted
    assert n_on_device(drafted) == 0


def test_n_grams_are_checked_on_the_device(model: Settings) -> None:
    text = " ".join(["one two three four"] * 6)
    ngrams = Bench(**without_head(model), spec_type=("ngram-simple",), backend_sampling=True)
    ngrams.engine.drafts.use([NgramDrafter(NgramRules(name="ngram-simple", n=2, n_max=8))])
    ngrams.engine.drafts.costs = FlatCosts()
    sampling = SamplingParams(seed=9, temperature=0.4)
    for i in range(2):
        ngrams.submit(i, f"{text} {i}", 80, sampling=sampling)
    ngrams.run()
    ngrams.backend.close()
    expected = plain(model, [f"{text} {i}" for i in range(2)], 80, sampling=sampling)
    assert [ngrams.tokens[i] for i in range(2)] == expected
    assert any(end.timings.draft_n_accepted for end in ngrams.finished.values())


def test_random_numbers_of_wrong_guesses_are_drawn_again_after_a_preemption(
    model: Settings, drafted: Drafted
) -> None:
    drafted.finished.clear()
    drafted.submit(1, PROMPTS[0], 60, sampling=HOT, cache_prompt=False)
    for n in (6, 20, 34):
        while len(drafted.tokens[1]) < n:
            drafted.step()
        scheduler = drafted.engine._scheduler
        slot = next(slot for slot in scheduler.slots if slot.request)
        preempt(drafted.engine, slot)
        assert n_on_device(drafted) == 0
    drafted.run()
    assert [drafted.tokens[1]] == plain(model, PROMPTS[:1], 60, sampling=HOT)
    end = drafted.finished[1].timings
    assert 0 < end.draft_n_accepted < end.draft_n


def test_a_draft_is_as_long_as_its_sequence_may_have_rows(model: Settings) -> None:
    with load(model, parallel=1, backend_sampling=True) as backend:
        rows = range(1 + DRAFT_ROWS)
        backend.batch.clear()
        for row in rows:
            backend.batch.add(300 + row, row, 0, logits=True)
        backend.decode()
        with backend.sampler(GREEDY, ()) as sampler:
            expected = [sampler.sample(row) for row in rows]
            sampler.attach(0)
            sampler.sample(0)  # the decodes of the sequence sample from now on
            backend.memory.remove(0, 0)
            backend.decode()
            assert sampler._seq == 0
            assert [sampler.sample(row) for row in rows] == expected
