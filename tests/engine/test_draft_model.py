"""With a draft model the outputs are what they are without it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.draft_models import write_weak_draft
from tests.support.llama_bench import Bench
from trioserve.engine.drafts import drafts
from trioserve.llama.drafter import LlamaDrafter
from trioserve.models import BUNDLED
from trioserve.types import Grammar, SamplingParams

PROMPTS = [
    "<|im_start|>user\nCount from 1 to 10<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nHello!<|im_end|>\n<|im_start|>assistant\n",
    "<|im_start|>user\nTell me a story<|im_end|>\n<|im_start|>assistant\n",
    "Once upon a time",
    "The capital of Italy is",
    "1 2 3 4 5 6",
    "a",
    "Ünïcödé, 😀 and\n\n\ttabs",
]
ENDLESS = SamplingParams(temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def weak(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_weak_draft(tmp_path_factory.mktemp("models") / "weak.gguf")


@pytest.fixture
def draft(request: pytest.FixtureRequest, weak: Path) -> str:
    """Return a model that is often wrong, or the model itself if a test asks for that."""
    return str(BUNDLED if getattr(request, "param", "weak") == "itself" else weak)


@pytest.fixture(autouse=True)
def always_drafting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask for drafts as long as there is room, whether they pay or not."""
    monkeypatch.setattr(drafts, "share_rows", lambda limits, *_: list(limits))


class DraftBench(Bench):
    """A bench that also looks whether the draft model holds what its drafter believes."""

    def step(self) -> bool:
        work_left = super().step()
        drafter = self.backend.drafters[0]
        assert isinstance(drafter, LlamaDrafter)
        drafter.check_integrity()
        return work_left


@pytest.fixture
def plain() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.backend.close()


def drafting(draft: str, **config: object) -> DraftBench:
    return DraftBench(**{"spec_draft_model": draft, "spec_draft_n_max": 6} | config)


def closed(bench: Bench) -> None:
    bench.engine._close()


@pytest.mark.parametrize(
    ("draft", "unified"), [("itself", True), ("weak", False)], indirect=["draft"]
)
def test_the_output_in_company(plain: Bench, draft: str, *, unified: bool) -> None:
    alone = [plain.alone(prompt, 40) for prompt in PROMPTS]
    bench = drafting(draft, kv_unified=unified, ctx_size=4096)
    for i, prompt in enumerate(PROMPTS):
        bench.submit(i, prompt, 40)
    bench.run()
    closed(bench)
    assert all(said.is_said_by(bench.tokens[i]) for i, said in enumerate(alone))


def test_a_draft_that_is_always_right_saves_steps(plain: Bench) -> None:
    said = plain.alone(PROMPTS[3], 61, sampling=ENDLESS)
    bench = drafting(str(BUNDLED), spec_draft_n_max=5, parallel=1)
    bench.submit(1, PROMPTS[3], 61, sampling=ENDLESS)
    n_steps = 1
    while bench.step():
        n_steps += 1
    closed(bench)
    assert said.is_said_by(bench.tokens[1])
    assert n_steps <= 30  # a busy machine may pause drafts for a while


def test_with_grammars(draft: str, plain: Bench) -> None:
    grammar = Grammar("gbnf", 'root ::= "[" [0-9]+ ("," [0-9]+)* "]"')
    outputs = []
    for bench in (plain, drafting(draft)):
        for i, prompt in enumerate(PROMPTS[:3]):
            constraint = bench.backend.compile(grammar)
            bench.submit(i, prompt, 30, constraint=constraint, grammar=grammar)
        bench.run()
        outputs.append([bench.tokens[i] for i in range(3)])
        texts = [bench.backend.vocab.detokenize(tokens) for tokens in outputs[-1]]
    closed(bench)
    assert outputs[0] == outputs[1]
    assert all(text.startswith(b"[") for text in texts)


def test_a_seed_gives_the_same_tokens(draft: str, plain: Bench) -> None:
    sampling = SamplingParams(temperature=0.8, seed=7)
    plain.submit(1, PROMPTS[2], 40, sampling=sampling)
    plain.run()
    bench = drafting(draft, parallel=1)
    bench.submit(1, PROMPTS[2], 40, sampling=sampling)
    bench.run()
    closed(bench)
    assert bench.tokens[1] == plain.tokens[1]


@pytest.mark.parametrize("draft", ["itself", "weak"], indirect=True)
def test_probabilities_are_those_of_the_model(draft: str, plain: Bench) -> None:
    said = plain.alone(PROMPTS[0], 30)
    bench = drafting(draft)
    bench.submit(1, PROMPTS[0], 30, n_probs=2)
    bench.run()
    closed(bench)
    assert said.is_said_by(bench.tokens[1])
    assert len(bench.margins) == len(bench.tokens[1])
    if bench.tokens[1] == said.tokens:
        assert bench.margins == pytest.approx(said.margins, abs=0.2)


def test_after_a_preemption(draft: str, plain: Bench) -> None:
    alone = [plain.alone(prompt, 150, sampling=ENDLESS) for prompt in PROMPTS[:2]]
    bench = drafting(draft, ctx_size=256, parallel=2, cache_ram=2**24)
    for i, prompt in enumerate(PROMPTS[:2]):
        bench.submit(i, prompt, 150, sampling=ENDLESS)
    preempted = False
    while bench.step():
        preempted = preempted or bool(bench.engine.status().waiting)
    closed(bench)
    assert preempted
    assert all(said.is_said_by(bench.tokens[i]) for i, said in enumerate(alone))
