"""Every architecture generates what llama.cpp's own loop does, whatever else the engine does.

The weights are random, and the KV cache holds 32 bits, so that the shape of a batch does not decide
between two tokens: the tokens have to be the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import numpy as np
import pytest

from tests.support import tiny_models
from tests.support.architectures import GENERATING, WINDOW
from tests.support.llama_bench import NEAR_TIE, Bench
from tests.support.plain_loop import EXACT, Said, plain_loop
from trioserve.types.task import shared_length

N = 32
#: Between the logits of the best token and the second one. Rounding moves them by 0.0001, but in
#: gemma3, whose activation llama.cpp looks up in a table of 16 bits, by 0.004.
MIN_MARGIN, MIN_MARGIN_GEMMA = 0.003, 0.02

#: Chosen so that no two tokens are nearly as good in any of the texts.
_SEED = 150

UNIFIED: dict[str, object] = {"kv_unified": True, "ctx_size": 4096}
SPLIT: dict[str, object] = {"kv_unified": False, "ctx_size": 4096}
SMALL_BATCHES: dict[str, object] = {**UNIFIED, "batch_size": 64, "ubatch_size": WINDOW}
#: Of each kind of memory one: plain attention, a sliding window, a recurrent state, and both. None
#: has experts: rounding may send a token to another expert, which moves its logits far.
each_memory = pytest.mark.parametrize("known", ["llama", "gemma3", "mamba2", "lfm2"], indirect=True)
each_kind = pytest.mark.parametrize(
    ("known", "kind"),
    [
        pytest.param("llama", SPLIT, id="llama, split"),
        pytest.param("llama", SMALL_BATCHES, id="llama, small batches"),
        pytest.param("gemma3", UNIFIED, id="gemma3, unified"),
        pytest.param("gemma3", SMALL_BATCHES, id="gemma3, small batches"),
        pytest.param("mamba2", UNIFIED, id="mamba2, unified"),
        pytest.param("lfm2", SPLIT, id="lfm2, split"),
    ],
    indirect=["known"],
)


def words(seed: int, n: int) -> str:
    rng = np.random.default_rng(_SEED + seed)
    syllables = ["ba", "du", "ke", "mi", "lo", "sa", "te", "no", "ri", "fu", "ga", "po"]
    return " ".join("".join(rng.choice(syllables, 2)) for _ in range(n))


_SYSTEM = words(0, 4 * WINDOW)
PROMPTS = (
    "b",
    words(1, 3),
    _SYSTEM + words(2, 5),
    _SYSTEM + words(3, 20),
    words(4, 2 * WINDOW),
    _SYSTEM + words(2, 5) + words(5, 12 * WINDOW),
)


@attrs.frozen
class Known:
    """A model, its prompts, and what llama.cpp's own loop says to each of them."""

    name: str
    path: Path
    prompts: list[list[int]]
    said: list[Said]
    #: The third prompt with its answer and another 5 tokens of the user, and the next answer.
    next_turn: list[int]
    next_said: Said

    @contextmanager
    def bench(self, **config: object) -> Iterator[Bench]:
        bench = Bench(model=str(self.path), **{**EXACT, "parallel": 4, **config})
        try:
            yield bench
        finally:
            bench.backend.close()

    def check(self, bench: Bench) -> None:
        """Check what was said to tasks numbered as the prompts."""
        for i, said in enumerate(self.said):
            assert bench.tokens[i] == said.tokens[: len(bench.tokens[i])], f"prompt {i}"
            assert len(bench.tokens[i]) == N


@pytest.fixture(scope="module", params=GENERATING)
def known(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Known:
    path = tiny_models.write_generating(tmp_path_factory.mktemp("models"), request.param)
    with plain_loop(path, exact=True) as loop:
        prompts = [loop.tokenize(prompt) for prompt in PROMPTS]
        said = [loop.greedy(prompt, N) for prompt in prompts]
        next_turn = [*prompts[2], *said[2].tokens, *prompts[1]]
        return Known(request.param, path, prompts, said, next_turn, loop.greedy(next_turn, N))


def submit_all(bench: Bench, prompts: Sequence[Sequence[int]], **options: object) -> None:
    for i, prompt in enumerate(prompts):
        bench.submit(i, prompt, N, **options)


def test_the_text_is_neither_monotonous_nor_decided_by_rounding(known: Known) -> None:
    least = MIN_MARGIN_GEMMA if known.name == "gemma3" else MIN_MARGIN
    for said in (*known.said, known.next_said):
        assert len(said.tokens) == N
        assert len(set(said.tokens)) > N // 3
        assert min(said.margins) > least


@each_memory
def test_the_text_hangs_on_tokens_far_back(known: Known) -> None:
    """A part of the state that was missing or another's would be seen."""
    with plain_loop(known.path, exact=True) as loop:
        for place in (0, len(known.prompts[3]) - 2 * WINDOW, -2):
            changed = list(known.prompts[3])
            changed[place] += 1
            assert loop.greedy(changed, N).tokens != known.said[3].tokens


def test_alone_and_in_company(known: Known) -> None:
    with known.bench(**UNIFIED) as bench:
        for i in (2, 5):
            bench.submit(i, known.prompts[i], N, cache_prompt=False)
            bench.run()
            assert bench.tokens[i] == known.said[i].tokens
        submit_all(bench, known.prompts, cache_prompt=False)
        bench.run()
        known.check(bench)
        assert all(end.timings.cache_n == 0 for end in bench.finished.values())


@each_kind
def test_in_company_with_the_prefix_cache(known: Known, kind: dict[str, object]) -> None:
    with known.bench(**kind) as bench:
        for _ in range(2):
            submit_all(bench, known.prompts)
            bench.run()
            known.check(bench)
        if known.name == "llama":
            assert bench.finished[3].timings.cache_n > 4 * WINDOW


@each_kind
def test_a_text_goes_on(known: Known, kind: dict[str, object]) -> None:
    with known.bench(**kind) as bench:
        submit_all(bench, known.prompts[:4])
        bench.run()
        bench.submit(9, known.next_turn, N)
        bench.run()
        assert bench.tokens[9] == known.next_said.tokens
        # The last token that was generated is not in the cache, for it was not decoded.
        assert bench.finished[9].timings.cache_n >= len(known.prompts[2]) + N - 1


@each_memory
@pytest.mark.parametrize("cache_ram", [0, 2**24], ids=["computed again", "from RAM"])
def test_after_preemption(known: Known, cache_ram: int) -> None:
    with known.bench(ctx_size=256, parallel=3, cache_ram=cache_ram) as bench:
        for i in (2, 3, 4):
            bench.submit(i, known.prompts[i], N)
        preempted = False
        while bench.step():
            decoding = any(bench.tokens[i] for i in bench.tokens if i not in bench.finished)
            preempted |= decoding and bool(bench.engine.status().waiting)
        assert preempted
        assert all(bench.tokens[i] == known.said[i].tokens for i in (2, 3, 4))


@each_memory
def test_back_from_ram(known: Known) -> None:
    with known.bench(ctx_size=512, parallel=1, cache_seqs=0, cache_ram=2**24) as bench:
        for i in (2, 4):
            bench.submit(i, known.prompts[i], N)
            bench.run()
        bench.submit(9, known.next_turn, N)
        bench.run()
        assert bench.tokens[9] == known.next_said.tokens
        assert bench.finished[9].timings.cache_n >= len(known.prompts[2]) + N - 1


@each_memory
@pytest.mark.parametrize("layout", [UNIFIED, SPLIT], ids=["unified", "split"])
def test_back_from_disk(known: Known, layout: dict[str, object], tmp_path: Path) -> None:
    with known.bench(**layout, cache_ram=2**24, disk=tmp_path) as bench:
        bench.submit(2, known.prompts[2], N)
        while 2 not in bench.finished:  # it may wait for the disk
            bench.step()
        bench.engine._close()
    with known.bench(**layout, cache_ram=2**24, disk=tmp_path) as bench:
        bench.submit(9, known.next_turn, N)
        while 9 not in bench.finished:
            bench.step()
        assert bench.tokens[9] == known.next_said.tokens
        assert bench.finished[9].timings.cache_n >= len(known.prompts[2]) + N - 1
        bench.engine._close()


@each_memory
@pytest.mark.parametrize("n_steps", [1, 20], ids=["in prefill", "in decode"])
def test_after_a_cancel(known: Known, n_steps: int) -> None:
    with known.bench(**SMALL_BATCHES) as bench:
        submit_all(bench, known.prompts)
        for _ in range(n_steps):
            bench.step()
        for i in (0, 3, 5):
            bench.engine.cancel(i)
        bench.step()
        for i in (0, 3, 5):
            bench.submit(i, known.prompts[i], N)
        bench.run()
        known.check(bench)


@pytest.mark.parametrize("known", ["gemma3"], indirect=True)
def test_a_window_whose_cells_are_all_kept(known: Known) -> None:
    with known.bench(**UNIFIED, swa_full=True) as bench:
        submit_all(bench, known.prompts)
        bench.run()
        known.check(bench)
        assert bench.finished[3].timings.cache_n > 4 * WINDOW


@each_memory
def test_as_served_by_default(known: Known) -> None:
    """With 16 bits and flash attention, two tokens that are nearly equal may change places."""
    with plain_loop(known.path) as loop:
        expected = [loop.greedy(prompt, N) for prompt in known.prompts]
    defaults = {"cache_type_k": "f16", "cache_type_v": "f16", "flash_attn": "auto"}
    with known.bench(**UNIFIED, **defaults) as bench:
        submit_all(bench, known.prompts)
        bench.run()
    for i, said in enumerate(expected):
        n = shared_length(said.tokens, bench.tokens[i])
        assert n == N or said.margins[n] < NEAR_TIE
