"""Scores of prompts: those of llama.cpp's own loop, whatever runs beside."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st
from hypothesis.extra.numpy import arrays

from tests.engine.test_architectures import words
from tests.support import tiny_models
from tests.support.llama_bench import Bench
from tests.support.plain_loop import EXACT, plain_loop
from trioserve.errors import DecodeError
from trioserve.llama.sampler import add_score
from trioserve.types import PromptScores

#: The difference that the order of sums may make in a log probability.
CLOSE = 1e-3

STORY = "Once upon a time, there was a little dog named Spot. " * 5


@given(
    logits=arrays(
        np.float32,
        st.integers(1, 700),
        elements=st.floats(-50, 50, width=32) | st.sampled_from([0.0, 3.0, -math.inf]),
    ),
    n_top=st.integers(0, 12),
    data=st.data(),
)
def test_a_score_is_that_of_the_definition(
    logits: np.ndarray[Any, np.dtype[np.float32]], n_top: int, data: st.DataObject
) -> None:
    logits[0] = 1.0  # the largest is finite
    token = data.draw(st.integers(0, len(logits) - 1))
    n_top = min(n_top, len(logits))
    exact = logits.astype(np.float64)
    exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
    order = sorted(range(len(logits)), key=lambda id_: (-logits[id_], id_))
    rank = int((logits >= logits[token]).sum())
    scores = PromptScores(n_top, lambda id_: b"%d" % id_)
    add_score(scores, logits, token)
    (one,) = scores
    assert one.chosen.piece == b"%d" % token
    assert one.chosen.logprob == pytest.approx(exact[token], abs=1e-5)
    assert [each.id for each in one.top] == order[:n_top]
    assert [each.logprob for each in one.top] == pytest.approx(exact[order[:n_top]], abs=1e-5)
    assert one.rank == rank


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_logits_that_are_no_numbers(value: float) -> None:
    logits = np.array([1.0, value, 2.0], dtype=np.float32)
    with pytest.raises(DecodeError, match="not finite"):
        add_score(PromptScores(1, lambda _: b""), logits, 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_unified": False},
        {"batch_size": 32, "ubatch_size": 32},
        {"spec_type": ("ngram-simple",)},
        {"backend_sampling": True},
    ],
    ids=str,
)
def test_the_scores_are_those_of_llama_cpp(options: dict[str, object], tmp_path: Path) -> None:
    # Its weights are floats: products of quantized ones are rounded as the shape of a batch is.
    path = tiny_models.write_generating(tmp_path, "llama")
    layout = {"model": str(path), "parallel": 4, "ctx_size": 4096}
    bench = Bench(cache_ram=2**24, **layout, **EXACT, **options)
    tokenize = bench.backend.vocab.tokenize
    texts = [STORY + end for end in ("The end.", "He ran.", "")] + ["Hi", STORY[9:200]]
    prompts = [tokenize(text, add_special=True) for text in texts]
    try:
        bench.submit(100, "A boy named Tim", 80)  # a stream beside them
        for _ in range(5):
            bench.step()
        for i, prompt in enumerate(prompts):
            bench.submit(i, prompt, i, prompt_logprobs=i)
        bench.run()
        alone = bench.alone("A boy named Tim", 80)
        assert alone.is_said_by(bench.tokens[100])
    finally:
        bench.backend.close()
    with plain_loop(path, exact=True) as loop:
        for i, prompt in enumerate(prompts):
            found = bench.scores[i]
            assert [each.chosen.id for each in found] == [*prompt[1:]]
            assert [each.chosen.logprob for each in found] == pytest.approx(
                loop.scores(prompt), rel=CLOSE, abs=CLOSE
            )
            for each in found:
                assert len(each.top) == i
                if i:
                    assert (each.rank == 1) == (each.top[0].id == each.chosen.id)


@pytest.mark.parametrize("name", ["gemma3", "mamba2", "granitehybrid"])
def test_memory_that_cannot_be_cut(name: str, tmp_path: Path) -> None:
    path = tiny_models.write_generating(tmp_path, name)
    bench = Bench(cache_ram=2**24, model=str(path), parallel=3, ctx_size=4096, **EXACT)
    assert not bench.backend.can_cut
    shared = bench.backend.vocab.tokenize(words(1, 120))
    prompts = [(*shared, *bench.backend.vocab.tokenize(words(i, 10))) for i in range(5)]
    try:
        bench.submit(0, prompts[0], 4)  # cached, but without scores
        bench.run()
        for i, prompt in enumerate(prompts):
            bench.submit(i, prompt, 4, prompt_logprobs=1)
        bench.run()
    finally:
        bench.backend.close()
    with plain_loop(path, exact=True) as loop:
        for i, prompt in enumerate(prompts):
            found = [each.chosen.logprob for each in bench.scores[i]]
            assert found == pytest.approx(loop.scores(prompt), rel=CLOSE, abs=CLOSE)
