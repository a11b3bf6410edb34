"""Gemma 3 270M: what only a real model can show, such as sense, a window of 512, 262,144 tokens."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from jsonschema import validate

from tests.support.llama_bench import GREEDY, Bench
from tests.support.measured import Report
from tests.support.plain_loop import PlainLoop, Said, plain_loop
from trioserve.types import Grammar, SamplingParams
from trioserve.types.task import shared_length

pytestmark = pytest.mark.system

N = 32
#: A difference of two logits that rounding may turn around.
NEAR_TIE = 0.5

QUESTIONS = (
    ("Question: What is the capital of France?\nAnswer:", r" Paris\b"),
    ("Question: What is the capital of Japan?\nAnswer:", r" Tokyo\b"),
    ("1, 2, 3, 4, 5,", r" 6, 7, 8, 9, 10, 11, 12"),
    ("Monday, Tuesday, Wednesday,", r" Thursday, Friday, Saturday"),
    ("The opposite of hot is", r" cold\b"),
)
OTHERS = (
    "Once upon a time, there was a",
    "def fibonacci(n):\n",
    "Der schnellste Weg nach Berlin",
    "The sea is wide and the wind is strong. " * 70 + "So the sailors",  # beyond the window
)


@pytest.fixture(scope="module")
def bench(gemma: Path) -> Iterator[Bench]:
    bench = Bench(model=str(gemma), parallel=4, ctx_size=4096, cache_seqs=4)
    yield bench
    bench.backend.close()


@pytest.fixture(scope="module")
def loop(gemma: Path) -> Iterator[PlainLoop]:
    with plain_loop(gemma, n_ctx=4096) as loop:
        yield loop


@pytest.fixture(scope="module")
def said(loop: PlainLoop) -> dict[str, Said]:
    prompts = (*(question for question, _ in QUESTIONS), *OTHERS)
    return {prompt: loop.greedy(loop.tokenize(prompt), N, n_batch=512) for prompt in prompts}


def tokenize(bench: Bench, prompt: str) -> tuple[int, ...]:
    return bench.backend.vocab.tokenize(prompt, add_special=True)


def text_of(bench: Bench, tokens: list[int]) -> str:
    return b"".join(bench.backend.vocab.pieces[token] for token in tokens).decode()


def test_it_is_the_model(bench: Bench) -> None:
    info = bench.backend.info
    assert info.n_vocab == 262_144
    assert info.metadata["gemma3.attention.sliding_window"] == "512"
    assert info.metadata["general.license"] == "gemma"


def test_tokens_are_llama_cpps(bench: Bench, loop: PlainLoop) -> None:
    for prompt in (*OTHERS, "naïve 日本語 🦊\n\n\ttabs  and   spaces", "<start_of_turn>user\n"):
        assert list(tokenize(bench, prompt)) == loop.tokenize(prompt)


def agrees(tokens: list[int], expected: Said) -> bool:
    """Whether an output is the expected one, or leaves it where two tokens are nearly equal.

    The engine cuts a long prompt into other batches, which round differently.
    """
    n = shared_length(expected.tokens, tokens)
    return n == len(expected.tokens) or expected.margins[n] < NEAR_TIE


def test_the_text_is_llama_cpps(bench: Bench, said: dict[str, Said]) -> None:
    for prompt, expected in said.items():
        tokens = list(bench.alone(tokenize(bench, prompt), N).tokens)
        assert agrees(tokens, expected), prompt


def test_it_is_the_same_in_company(bench: Bench, said: dict[str, Said]) -> None:
    for i, prompt in enumerate(said):
        bench.submit(i, tokenize(bench, prompt), N)
    bench.run()
    for i, expected in enumerate(said.values()):
        assert agrees(bench.tokens[i], expected)


@pytest.mark.parametrize("unified", [True, False, None])
def test_it_is_the_same_in_every_layout(
    gemma: Path, said: dict[str, Said], unified: bool | None
) -> None:
    """Together, after a beginning that all share; and none of it depends on the layout."""
    bench = Bench(model=str(gemma), parallel=8, ctx_size=8192, kv_unified=unified)
    try:
        for i, prompt in enumerate(said):
            bench.submit(i, tokenize(bench, prompt), N)
            bench.submit(100 + i, tokenize(bench, prompt), N)
        bench.run()
        for i, expected in enumerate(said.values()):
            assert agrees(bench.tokens[i], expected)
            assert agrees(bench.tokens[100 + i], expected)
    finally:
        bench.backend.close()


def test_it_knows_simple_things(bench: Bench, said: dict[str, Said]) -> None:
    for question, answer in QUESTIONS:
        assert re.match(answer, text_of(bench, said[question].tokens)), question


SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "colour": {"enum": ["red", "green", "blue"]},
    },
    "required": ["name", "age", "colour"],
    "additionalProperties": False,
}


def test_json_schema(bench: Bench) -> None:
    grammar = Grammar("json_schema", json.dumps(SCHEMA))
    prompt = tokenize(bench, "A person as JSON, such as Anna, 31 years old, who likes blue: ")
    for i, temperature in enumerate((0.0, 1.0, 1.5)):
        sampling = SamplingParams(temperature=temperature, seed=i)
        constraint = bench.backend.compile(grammar)
        bench.submit(i, prompt, 200, sampling=sampling, grammar=grammar, constraint=constraint)
    bench.run()
    for i in range(3):
        validate(json.loads(text_of(bench, bench.tokens[i])), SCHEMA)


def test_a_constant(bench: Bench) -> None:
    grammar = Grammar("json_schema", json.dumps({"const": "42 日本 🦊"}))
    bench.submit(
        0, tokenize(bench, "x"), 50, grammar=grammar, constraint=bench.backend.compile(grammar)
    )
    bench.run()
    assert json.loads(text_of(bench, bench.tokens[0])) == "42 日本 🦊"


def test_how_fast_grammars_are(gemma: Path, report: Report) -> None:
    """With a vocabulary of 262,144 tokens. What it takes is reported; it has to work."""
    bench = Bench(model=str(gemma), parallel=1, ctx_size=1024, cache_seqs=0)
    try:
        times = []
        for schema in (SCHEMA, {"type": "array", "items": SCHEMA}):
            start = time.perf_counter()
            bench.backend.compile(Grammar("json_schema", json.dumps(schema)))
            times.append(time.perf_counter() - start)
        report(f"the first grammar: {times[0] * 1e3:.0f} ms; the second: {times[1] * 1e3:.1f} ms")
        grammar = Grammar("regex", r"([A-Z][a-z]+ ){64}")
        plain = _time_of_tokens(bench, None)
        masked = _time_of_tokens(bench, grammar)
        assert plain > 0 and masked > 0
        report(f"a token: {plain * 1e3:.1f} ms; with a mask: {masked * 1e3:.1f} ms")
    finally:
        bench.backend.close()


def _time_of_tokens(bench: Bench, grammar: Grammar | None, n: int = 64) -> float:
    """Return how long a token takes."""
    constraint = None if grammar is None else bench.backend.compile(grammar)
    sampling = SamplingParams(temperature=GREEDY.temperature, ignore_eos=grammar is None)
    bench.submit(
        1,
        tokenize(bench, "My name is"),
        n,
        sampling=sampling,
        grammar=grammar,
        constraint=constraint,
        cache_prompt=False,
    )
    bench.run()
    timings = bench.finished[1].timings
    assert timings.predicted_n > n // 2
    return timings.predicted_ms / 1e3 / timings.predicted_n
