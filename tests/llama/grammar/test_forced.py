"""GrammarVocab that a grammar forces are those that its masks would have left, one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.grammar_bench import GREEDY, SCHEMAS, Bench, schema
from trioserve import llama
from trioserve.config import Config
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar.matcher import CompiledGrammar, matcher_for
from trioserve.types import Grammar, SamplingParams, Thinking

RECORD = {
    "type": "object",
    "properties": {
        "identifier_of_the_record": {"type": "boolean"},
        "name_of_the_author": {"const": "somebody else"},
        "color": {"enum": ["red", "green", "blue-green"]},
        "children": {"type": "array", "items": {"$ref": "#"}, "maxItems": 1},
    },
    "required": ["identifier_of_the_record", "name_of_the_author", "color"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def exact_backend() -> Iterator[LlamaBackend]:
    """The bundled model with a cache that rounds nothing."""
    config = Config(threads=1, ctx_size=2048, parallel=4, cache_type_k="f32", cache_type_v="f32")
    with llama.load(config) as backend:
        yield backend


GRAMMARS = [
    *(schema(value) for value in (*SCHEMAS.values(), RECORD)),
    Grammar("regex", "(abc|abd)+(, and so on){2}"),
    Grammar("gbnf", 'root ::= "yes, of course" | "no, " ("never" | "not now")'),
    Grammar("json_object"),
]


@pytest.mark.system
@pytest.mark.parametrize("grammar", GRAMMARS, ids=range(len(GRAMMARS)))
def test_forced_tokens_are_those_that_the_masks_leave(
    backend: LlamaBackend, grammar: Grammar
) -> None:
    compiled = backend.compile(grammar)
    assert isinstance(compiled, CompiledGrammar)
    for seed in range(8):
        chance = random.Random(seed)
        quick, slow = compiled.matcher(), compiled.matcher()
        n_tokens = 0
        while n_tokens < 120:
            allowed = slow.mask().ids.tolist()
            assert quick.mask().ids.tolist() == allowed
            token = chance.choice(allowed)
            quick.accept(token)
            slow.accept(token)
            if token in backend.vocab.end_of_generation:
                break
            n_max = chance.choice([0, 1, 3, 16])
            forced = quick.forced(n_max)
            assert len(forced) <= n_max
            for one in forced:
                assert slow.mask().only == one
                slow.accept(one)
            n_tokens += 1 + len(forced)
            if chance.random() < 0.2:  # again, before a mask is made
                forced = quick.forced(2)
                for one in forced:
                    assert slow.mask().only == one
                    slow.accept(one)
        quick.close()
        slow.close()


def count_decodes(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    sizes: list[int] = []
    decode = bench.backend.decode

    def counted() -> None:
        sizes.append(len(bench.backend.batch))
        decode()

    monkeypatch.setattr(bench.backend, "decode", counted)
    return sizes


def outputs(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch, *, n_ahead: int, **params: Any
) -> tuple[list[list[int]], list[Any], int]:
    bench = Bench(backend)
    bench.engine._samplers._n_ahead = n_ahead
    sizes = count_decodes(bench, monkeypatch)
    for i, grammar in enumerate([schema(RECORD), schema(SCHEMAS["object"]), None]):
        bench.submit(i, grammar, max_tokens=120, **params)
    bench.run()
    bench.engine.check_integrity()
    monkeypatch.undo()
    return list(bench.tokens.values()), list(bench.probs.values()), len(sizes)


SEEDED = SamplingParams(seed=7, repeat_penalty=1.3, repeat_last_n=32)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_the_output_is_the_same_in_fewer_steps(
    exact_backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch, sampling: SamplingParams
) -> None:
    plain = outputs(exact_backend, monkeypatch, n_ahead=0, sampling=sampling)
    quick = outputs(exact_backend, monkeypatch, n_ahead=16, sampling=sampling)
    assert quick[0] == plain[0]
    assert quick[2] <= plain[2]


def test_a_constant_takes_a_few_steps(
    exact_backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(exact_backend)
    sizes = count_decodes(bench, monkeypatch)
    bench.submit(1, schema({"const": "a long constant text that nobody can choose"}))
    bench.run()
    assert "a long constant text" in bench.text[1]
    n_tokens = len(bench.tokens[1])
    assert n_tokens > 12
    assert len(sizes) <= 2 + n_tokens // 4


def test_what_the_request_forbids_is_not_forced(backend: LlamaBackend) -> None:
    compiled = backend.compile(Grammar("regex", "abcabcabc|xyz"))
    assert isinstance(compiled, CompiledGrammar)
    matcher = compiled.matcher(banned=[5])
    matcher.accept(next(token for token in matcher.mask().ids.tolist()))
    assert matcher.forced(16) == []


def test_nothing_is_forced_while_the_model_may_think(backend: LlamaBackend) -> None:
    thinking = Thinking(start="<a>", end="</a>", begun=True)
    compiled = backend.compile(Grammar("regex", "abcabcabc", thinking=thinking))
    assert isinstance(compiled, CompiledGrammar)
    matcher = matcher_for(compiled)
    tokens = [*backend.vocab.tokenize("well", is_fragment=True)]
    for token in tokens:
        assert matcher.accept(token)
        assert matcher.forced(16) == []
