"""Drafts on models whose sequences cannot be cut: states that go back, or that were saved before.

The output is that without drafts, whatever becomes of the sequences in between. The drafts are
right and wrong in turn, and of different lengths in all slots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support import asked_models, tiny_models
from tests.support.llama_bench import Bench
from tests.support.oracle import Oracle
from tests.support.plain_loop import EXACT, plain_loop
from tests.support.step_costs import FlatCosts
from trioserve.engine import DecodeMaximal, Engine
from trioserve.llama.layout import MAX_SNAPSHOTS
from trioserve.types import Grammar, SamplingParams

#: Those that go back to a state of the last few; those that save it before; and with a window.
KINDS, OTHERS = ("lfm2", "mamba2", "gemma3"), ("granitehybrid", "qwen3next", "gpt-oss")
BOTH = ("lfm2", "mamba2")
SLOW = pytest.mark.system

N = 48
PROMPTS = (
    "Once upon a time",
    "Hello there, what is",
    "The quick brown fox jumps over the lazy dog. " * 3,
    "a",
    "zzz top of the",
    "12345 678",
    "Once upon a midnight",
    "Lorem ipsum dolor sit amet " * 4,
)

Scenario = Callable[["Noted"], None]
ENDLESS = SamplingParams(temperature=0, ignore_eos=True)


def together(bench: Noted) -> None:
    for i, prompt in enumerate(PROMPTS):
        bench.submit(i, prompt, N)
    bench.run()


def with_the_next_turns(bench: Noted) -> None:
    together(bench)
    for i, prompt in enumerate(PROMPTS):
        text = [*bench.backend.vocab.tokenize(prompt), *bench.tokens[i]]
        bench.submit(10 + i, [*text, 301, 302], N)  # continues what is cached
        bench.submit(20 + i, text[: len(text) - N // 2], 8)  # begins in the middle of it
    bench.run()


def beside_long_prompts(bench: Noted) -> None:
    for i, prompt in enumerate(PROMPTS[:4]):
        bench.submit(i, prompt, N)
    for _ in range(4):
        bench.step()
    for i in range(4, 8):
        bench.submit(i, [300 + (i + j * j) % 97 for j in range(60 + 40 * i)], N)
        bench.step()
    bench.run()


def with_cancels(bench: Noted) -> None:
    for i, prompt in enumerate(PROMPTS):
        bench.submit(i, prompt, N)
    for _ in range(5):
        bench.step()
    for i in (0, 3, 5):
        bench.engine.cancel(i)
    for i in (0, 3, 5):
        bench.tokens.pop(i)
        bench.submit(10 + i, PROMPTS[i], N)
    bench.run()


def with_copies_and_seeds(bench: Noted) -> None:
    for i in range(8):
        sampling = SamplingParams(temperature=4.0, top_k=4, seed=i // 2)
        bench.submit(i, PROMPTS[2], N, sampling=sampling)
    bench.run()


def with_grammars(bench: Noted) -> None:
    grammar = Grammar("gbnf", 'root ::= ("[" [0-9]+ ("," [0-9]+)* "]")*')
    for i, prompt in enumerate(PROMPTS):
        constraint = bench.backend.compile(grammar)
        bench.submit(i, prompt, N, constraint=constraint, grammar=grammar)
    bench.run()


def with_stop_strings_and_probs(bench: Noted) -> None:
    for i, prompt in enumerate(PROMPTS):
        more = {"n_probs": 2} if i % 2 else {"stop": ("a", "9")}
        bench.submit(i, prompt, N, **more)
    bench.run()


def with_slot_files(bench: Noted) -> None:
    together(bench)
    saved = [bench.engine.save_slot(i, "") for i in range(8)]
    for i in range(8):
        bench.engine.erase_slot(i, "")
    for i, one in enumerate(saved):
        bench.engine.restore_slot(i, one)
        bench.submit(10 + i, [*one.keys, 301], N)
    bench.run()
    assert all(bench.finished[10 + i].timings.cache_n >= N - 2 for i in range(8))


SCENARIOS = (
    together,
    with_the_next_turns,
    beside_long_prompts,
    with_cancels,
    with_copies_and_seeds,
    with_grammars,
    with_stop_strings_and_probs,
    with_slot_files,
)


class Noted(Bench):
    """Notes the prompts. With an oracle, there are drafts."""

    def __init__(self, path: Path, oracle: Oracle | None = None, **config: Any) -> None:
        drafts = {} if oracle is None else {"spec_type": ("ngram-simple",)}
        settings = {**EXACT, "parallel": 8, "ctx_size": 8192, **config, **drafts}
        super().__init__(model=str(path), **settings)
        self.prompts: dict[int, list[int]] = {}
        self._oracle = oracle
        self.use_oracle()

    def use_oracle(self) -> None:
        """Ask no other drafter."""
        self.engine.drafts.use([self._oracle] if self._oracle else [])
        self.engine.drafts.costs = FlatCosts()

    def submit(self, task_id: int, prompt: str | Sequence[int], *args: Any, **options: Any) -> None:
        if isinstance(prompt, str):
            prompt = self.backend.vocab.tokenize(prompt)
        self.prompts[task_id] = list(prompt)
        super().submit(task_id, prompt, *args, **options)


def play(
    scenario: Callable[[Noted], None],
    path: Path,
    *,
    right: float = 0.7,
    length: int = 64,
    **config: Any,
) -> Noted:
    """Play it without drafts, and then with drafts of at most this length; returns the latter."""
    plain = Noted(path, **config)
    scenario(plain)
    plain.backend.close()
    texts = [[*plain.prompts[i], *tokens] for i, tokens in plain.tokens.items()]
    bench = Noted(path, Oracle(texts, right, length), **config)
    scenario(bench)
    bench.backend.close()
    assert bench.tokens == plain.tokens
    ends = [end.timings for end in bench.finished.values()]
    n_accepted = sum(one.draft_n_accepted for one in ends)
    assert 0 < n_accepted <= right * sum(one.draft_n for one in ends)
    return bench


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name in (*KINDS, *OTHERS):
        tiny_models.write_generating(folder, name)
    return folder


@pytest.mark.parametrize("parallel", [1, 8])
@pytest.mark.parametrize("name", [*KINDS, *(pytest.param(one, marks=SLOW) for one in OTHERS)])
def test_alone_and_in_company(name: str, parallel: int, folder: Path) -> None:
    play(together, folder / f"{name}.gguf", parallel=parallel)


@SLOW
@pytest.mark.parametrize("name", asked_models.FAMILIES)
def test_families_whose_states_go_back(name: str, tmp_path: Path) -> None:
    path = asked_models.write(tmp_path, name)
    with plain_loop(path, exact=True) as loop:
        said = {i: loop.greedy(loop.tokenize(one), N).tokens for i, one in enumerate(PROMPTS)}
    bench = play(together, path, parallel=1)
    assert bench.tokens == said
    rollback = bench.backend.rollback
    assert (rollback.n_max, rollback.needs_state) == (MAX_SNAPSHOTS, False)
    for scenario in (with_the_next_turns, beside_long_prompts, with_slot_files):
        play(scenario, path, cache_ram=2**26)


@SLOW
@pytest.mark.parametrize("scenario", SCENARIOS[1:])
@pytest.mark.parametrize("name", BOTH)
def test_drafts_in_every_scenario(name: str, scenario: Scenario, folder: Path) -> None:
    play(scenario, folder / f"{name}.gguf", cache_ram=2**26)


@SLOW
@pytest.mark.parametrize("scenario", [with_the_next_turns, beside_long_prompts])
@pytest.mark.parametrize("name", KINDS)
def test_in_small_batches(name: str, scenario: Scenario, folder: Path) -> None:
    play(scenario, folder / f"{name}.gguf", batch_size=64, ubatch_size=16)


@SLOW
@pytest.mark.parametrize("name", KINDS)
def test_in_a_split_cache(name: str, folder: Path) -> None:
    play(with_the_next_turns, folder / f"{name}.gguf", cache_ram=2**26, kv_unified=False)


@SLOW
@pytest.mark.parametrize("cache_ram", [0, 2**26])
@pytest.mark.parametrize("name", KINDS)
def test_a_context_that_is_too_small(name: str, cache_ram: int, folder: Path) -> None:
    """Requests are preempted and resumed."""
    play(together, folder / f"{name}.gguf", ctx_size=512, cache_ram=cache_ram, kv_unified=True)


@SLOW
@pytest.mark.parametrize("name", BOTH)
def test_through_the_disk(name: str, folder: Path, tmp_path: Path) -> None:
    def restarted(bench: Noted) -> None:
        for i, prompt in enumerate(PROMPTS):
            bench.submit(i, prompt, N)
            while i not in bench.finished:  # it may wait for the disk
                bench.step()
        bench.engine._cache.write_all()

    for _ in range(2):
        play(restarted, folder / f"{name}.gguf", cache_ram=2**26, disk=tmp_path)


@SLOW
@pytest.mark.parametrize("name", BOTH)
def test_a_context_that_shifts(name: str, folder: Path) -> None:
    def shifting(bench: Noted) -> None:
        bench.engine = Engine(bench.backend, DecodeMaximal(), lambda: None, context_shift=True)
        bench.use_oracle()
        for i, prompt in enumerate(PROMPTS[:2]):
            bench.submit(i, prompt, 300, sampling=ENDLESS)
        bench.run()

    play(shifting, folder / f"{name}.gguf", ctx_size=512, parallel=1)


@pytest.mark.parametrize("name", ["lfm2", "qwen3next"])
@pytest.mark.parametrize("length", [1, 3, 7])
def test_right_drafts_save_as_many_steps_as_they_are_long(
    name: str, length: int, folder: Path
) -> None:
    n_steps = 0

    def counting(bench: Noted) -> None:
        nonlocal n_steps
        bench.submit(1, PROMPTS[0], 200, sampling=ENDLESS)
        n_steps = 1
        while bench.step():
            n_steps += 1

    play(counting, folder / f"{name}.gguf", right=1, length=length, parallel=1)
    # One is for the prompt and its token.
    assert n_steps <= 1 + -(-199 // (1 + length))


@pytest.mark.parametrize("draft", ["mamba2", "lfm2"])
def test_a_draft_model_that_is_recurrent(draft: str, folder: Path) -> None:
    """It drafts for itself, so all it guesses is right if it goes back as it should."""
    path = str(folder / f"{draft}.gguf")
    plain = Noted(Path(path), parallel=3)
    bench = Bench(
        model=path, spec_draft_model=path, spec_draft_n_max=5, parallel=3, ctx_size=8192, **EXACT
    )
    bench.engine.drafts.costs = FlatCosts()
    for one in (plain, bench):
        for i, prompt in enumerate(PROMPTS[:3]):
            one.submit(i, prompt, N)
        one.run()
        for i, prompt in enumerate(PROMPTS[:3]):  # a new text, then cached ones
            one.submit(10 + i, prompt if i else PROMPTS[2] + PROMPTS[1], N)
        one.run()
        one.backend.close()
    assert bench.tokens == plain.tokens
    ends = [end.timings for end in bench.finished.values()]
    assert sum(one.draft_n_accepted for one in ends) > 0.95 * sum(one.draft_n for one in ends) > 100
