"""Scores of prompts: which rows of a batch have logits, and what the caches spare; scripted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.engine_harness import Harness
from trioserve.errors import DecodeError
from trioserve.testing import ScriptedBackend
from trioserve.types import CacheRoot, Chunk, Failed, PromptScores, TokenId

#: Longer than what is not worth a copy or a wait.
SHARED = "What all of the questions have in common is this long beginning. "


def harness(n_rows: int = 10, **options: Any) -> Harness:
    """An engine whose batches have logits for one token of each slot, and for `n_rows` scores."""
    backend = ScriptedBackend(lambda _: "Yes.", **options)
    backend.n_outputs, backend.n_score_rows = backend.n_slots, n_rows
    return Harness(backend)


def scores_of(engine: Harness, task_id: int) -> PromptScores:
    chunks = [event for event in engine.events[task_id] if isinstance(event, Chunk)]
    found = [chunk.scores for chunk in chunks if chunk.scores is not None]
    assert len(found) == 1
    assert chunks[0].scores is found[0], "they come first"
    return found[0]


def expected(prompt: str) -> list[float]:
    """The scores by `ScriptedBackend.score`."""
    return [-(n + token / 256) for n, token in enumerate(prompt.encode()) if n]


def check(engine: Harness, task_id: int, prompt: str, n_top: int = 0) -> None:
    found = scores_of(engine, task_id)
    assert [each.chosen.logprob for each in found] == expected(prompt)
    assert [each.chosen.id for each in found] == [*prompt.encode()[1:]]
    assert {len(each.top) for each in found} <= {n_top}


@pytest.mark.parametrize("n_rows", [1, 7, 64])
@pytest.mark.parametrize("length", [1, 2, 63, 64, 65, 200])
def test_each_token_but_the_first_has_a_score(n_rows: int, length: int) -> None:
    engine = harness(n_rows)
    prompt = "".join(chr(ord("a") + i % 26) for i in range(length))
    engine.complete(1, prompt, prompt_logprobs=2, max_tokens=3)
    check(engine, 1, prompt, 2)
    assert engine.text(1) == "Yes"


def test_a_stream_goes_on_beside_them() -> None:
    engine = harness(n_rows=4)
    engine.backend.script = lambda prompt: "x" * 500 if prompt == "Stream" else "Yes."
    engine.submit(1, "Stream")
    engine.step()
    engine.submit(2, "s" * 200, prompt_logprobs=1)
    n_steps = 0
    while 2 not in engine.events or engine.events[2] == []:
        n_before = len(engine.text(1))
        engine.step()
        n_steps += 1
        assert len(engine.text(1)) == n_before + 1, "each step has a token of the stream"
    assert n_steps >= 50
    check(engine, 2, "s" * 200, 1)


# -- what is computed again, and what is not


def test_cached_tokens_without_scores_are_computed_again() -> None:
    engine, prompt = harness(), SHARED + "Why?"
    engine.complete(1, prompt)
    engine.complete(2, prompt, prompt_logprobs=1)
    check(engine, 2, prompt, 1)
    assert engine.finish(2).timings.cache_n == 0


def test_scores_are_kept_for_the_same_beginning() -> None:
    engine = harness()
    engine.complete(1, SHARED + "Why?", prompt_logprobs=1)
    for task_id, end in enumerate(["Why?", "Where?", ""], start=2):
        engine.complete(task_id, SHARED + end, prompt_logprobs=1)
        check(engine, task_id, SHARED + end, 1)
        # The token after what they share has another score in each.
        assert engine.finish(task_id).timings.cache_n >= len(SHARED) - 1


@pytest.mark.parametrize(
    ("options", "root"),
    [
        ({"prompt_logprobs": 2}, CacheRoot()),
        ({"prompt_logprobs": 1}, CacheRoot(owner="another")),
        ({"prompt_logprobs": 1, "cache_prompt": False}, CacheRoot()),
    ],
)
def test_scores_are_not_kept_for_others(options: dict[str, Any], root: CacheRoot) -> None:
    engine = harness()
    engine.complete(1, SHARED, prompt_logprobs=1)
    engine.complete(2, SHARED, root, **options)
    check(engine, 2, SHARED, options["prompt_logprobs"])
    assert engine.finish(2).timings.cache_n == 0


def test_requests_that_arrive_together_compute_their_beginning_once() -> None:
    engine = harness(n_slots=4)
    prompts = [f"{SHARED}{i}" for i in range(8)]
    for task_id, prompt in enumerate(prompts, start=1):
        engine.submit(task_id, prompt, prompt_logprobs=1, max_tokens=1)
    engine.run()
    for task_id, prompt in enumerate(prompts, start=1):
        check(engine, task_id, prompt, 1)
    assert engine.backend.n_decoded <= len(SHARED) + 4 * len(prompts)


def test_few_scores_are_kept() -> None:
    engine = harness(n_slots=8)
    keeper = engine.engine._scheduler.scores
    keeper._limit = 64 * 200
    for task_id, sign in enumerate("abcd", start=1):
        engine.complete(task_id, sign * 90, prompt_logprobs=0)
    assert len(keeper._kept) == 2
    for task_id, (sign, is_kept) in enumerate([("d", True), ("c", True), ("a", False)], start=5):
        engine.complete(task_id, sign * 90, prompt_logprobs=0)
        assert (engine.finish(task_id).timings.cache_n > 0) is is_kept
    engine.submit(9, "e" * 300, prompt_logprobs=0)  # too long to be kept
    engine.run()
    check(engine, 9, "e" * 300)
    assert len(keeper._kept) == 2


# -- what may happen meanwhile


def test_logits_that_are_no_numbers_end_one_request(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = harness()

    def refuse(_scores: PromptScores, _row: int, _tokens: Sequence[TokenId]) -> None:
        raise DecodeError("no numbers")

    monkeypatch.setattr(engine.backend, "score", refuse)
    engine.submit(1, "scored", prompt_logprobs=0)
    engine.complete(2, "plain")
    assert isinstance(engine.events[1][-1], Failed)
    assert engine.text(2) == "Yes."


@given(
    prompts=st.lists(
        st.tuples(
            st.integers(0, len(SHARED)), st.text("ab", min_size=1, max_size=60), st.booleans()
        ),
        min_size=1,
        max_size=8,
    ),
    n_rows=st.integers(1, 20),
    cuts=st.booleans(),
    cancelled=st.sets(st.integers(1, 8), max_size=2),
)
@settings(max_examples=60, deadline=None)
def test_scores_are_right_beside_other_requests(
    prompts: list[tuple[int, str, bool]], n_rows: int, cuts: bool, cancelled: set[int]
) -> None:
    engine = harness(n_rows, n_slots=3, n_ctx=400, n_ctx_seq=400, can_cut=cuts)
    texts = [SHARED[:length] + end for length, end, _ in prompts]
    for task_id, (text, (_, _, wants)) in enumerate(zip(texts, prompts, strict=True), start=1):
        engine.submit(task_id, text, prompt_logprobs=1 if wants else None, max_tokens=4)
        engine.step()
    for task_id in cancelled:
        engine.engine.cancel(task_id)
    engine.run()
    for task_id, (text, (_, _, wants)) in enumerate(zip(texts, prompts, strict=True), start=1):
        if task_id not in cancelled:
            assert engine.text(task_id) == "Yes."
            if wants:
                check(engine, task_id, text, 1)
