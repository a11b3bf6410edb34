"""Sampling under a grammar: alone, and beside other tasks."""

from __future__ import annotations

import json
import re

import pytest

from tests.support.grammar_bench import GREEDY, SCHEMAS, Bench, generate, is_valid, schema
from trioserve.engine import DecodeMaximal, Engine
from trioserve.errors import EngineError, InvalidRequestError, TrioServeError
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar import matcher
from trioserve.llama.grammar.tokens import Mask
from trioserve.types import (
    Failed,
    FinishReason,
    GenerationParams,
    Grammar,
    Prompt,
    SamplingParams,
    Task,
)

# -- sampling


@pytest.mark.system
def test_the_end_comes_only_where_the_grammar_allows_it(backend: LlamaBackend) -> None:
    grammar = Grammar("regex", "a{3,6}")
    eager = tuple((token, 1000.0) for token in backend.vocab.end_of_generation)
    text, reason = generate(backend, grammar, sampling=SamplingParams(logit_bias=eager))
    assert (text, reason) == ("aaa", FinishReason.EOS)
    late = SamplingParams(ignore_eos=True)
    assert generate(backend, grammar, sampling=late) == ("aaaaaa", FinishReason.EOS)


def test_a_bias_that_leaves_nothing(backend: LlamaBackend) -> None:
    ids = {i for i, piece in enumerate(backend.vocab.pieces) if b"b" in piece}
    sampling = SamplingParams(logit_bias=tuple((token, float("-inf")) for token in sorted(ids)))
    bench = Bench(backend)
    bench.submit(1, Grammar("regex", "aab"), sampling=sampling)
    bench.run()
    end = bench.ends[1]
    assert isinstance(end, Failed) and end.error.param == "logit_bias"


@pytest.mark.system
def test_probabilities_before_the_samplers_know_no_grammar(backend: LlamaBackend) -> None:
    grammar = Grammar("regex", "[xyz]{2}")
    bench = Bench(backend)
    bench.submit(1, grammar, n_probs=3, sampling=GREEDY)
    bench.submit(2, grammar, n_probs=3, post_sampling_probs=True, sampling=SamplingParams(seed=1))
    bench.submit(3, None, n_probs=3, sampling=GREEDY, max_tokens=1)
    bench.run()
    assert bench.probs[1][0].top == bench.probs[3][0].top
    assert bench.probs[1][0].chosen.piece[:1] in b"xyz"
    for probs in bench.probs[2][:2]:
        assert all(candidate.piece[:1] in b"xyz" for candidate in (probs.chosen, *probs.top))


def test_a_dense_mask_draws_the_same_as_a_sparse_one(backend: LlamaBackend) -> None:
    """Hiding what is forbidden and listing what is allowed are the same to the samplers."""
    grammar = Grammar("regex", r'[^"\\]*')
    (row,) = [backend.batch.clear() or backend.batch.add(5, 0, 0, logits=True)]
    backend.memory.remove(0, 0)
    backend.decode()
    raw = None
    for seed in range(20):
        drawn = []
        for compact in (False, True):
            params = SamplingParams(seed=seed, temperature=1.5)
            with backend.sampler(params, (), backend.compile(grammar)) as sampler:
                logits = backend._context.logits(row, backend.vocab.n_tokens)
                raw = logits.copy() if raw is None else raw
                sampler._compact = compact
                drawn.append(sampler.sample(row))
                assert (logits == raw).all()
        assert drawn[0] == drawn[1]
    backend.memory.remove(0, 0)


# -- in company


def test_neighbours_do_not_notice(backend: LlamaBackend) -> None:
    alone = Bench(backend)
    prompts = {1: "Hello", 2: "The capital of France", 3: "1 2 3 4"}
    for task_id, prompt in prompts.items():
        alone.submit(task_id, None, prompt, sampling=GREEDY, max_tokens=16)
    alone.submit(4, None, sampling=GREEDY, max_tokens=16)
    alone.run()
    company = Bench(backend)
    for task_id, prompt in prompts.items():
        company.submit(task_id, None, prompt, sampling=GREEDY, max_tokens=16)
    company.submit(4, schema(SCHEMAS["nested"]), sampling=GREEDY)
    company.run()
    assert {i: company.tokens[i] for i in prompts} == {i: alone.tokens[i] for i in prompts}
    assert is_valid(json.loads(company.text[4]), SCHEMAS["nested"])


def test_cancelling_in_the_middle(backend: LlamaBackend) -> None:
    bench = Bench(backend)
    for task_id in range(4):
        bench.submit(task_id, Grammar("regex", r"(?s:.*)"), sampling=GREEDY)
    for _ in range(5):
        bench.step()
    for task_id in range(4):
        bench.engine.cancel(task_id)
    bench.step()
    assert not bench.engine._scheduler.has_work
    assert generate(backend, Grammar("regex", "abc")) == ("abc", FinishReason.EOS)


@pytest.mark.system
def test_a_matcher_that_gives_up_fails_its_task_alone(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(backend)
    bad, good = Grammar("regex", "bad[a-z]{20}"), Grammar("regex", "good[a-z]{20}")
    advance = matcher.Matcher.advance

    def give_up(one: matcher.Matcher, token: int) -> Mask:
        if one._compiled.grammar == bad:
            raise EngineError("The grammar cannot be followed: a limit.")
        return advance(one, token)

    monkeypatch.setattr(matcher.Matcher, "advance", give_up)
    bench.submit(1, bad, sampling=GREEDY)
    bench.submit(2, good, sampling=GREEDY)
    compiled = backend.compile(bad)
    bench.run()
    end = bench.ends[1]
    assert isinstance(end, Failed) and isinstance(end.error, EngineError)
    assert "a limit" in end.error.message
    assert bench.reason(2) is FinishReason.EOS and bench.text[2].startswith("good")
    assert backend.compile(bad) is not compiled  # others do not inherit its state


@pytest.mark.system
def test_a_grammar_that_takes_too_much_to_follow_is_the_fault_of_the_request(
    backend: LlamaBackend,
) -> None:
    long = Grammar("json_schema", json.dumps({"const": "x" * 200_000}), param="json_schema")
    bench = Bench(backend)
    bench.submit(1, long, sampling=GREEDY)
    bench.run()
    end = bench.ends[1]
    assert isinstance(end, Failed) and isinstance(end.error, InvalidRequestError)
    assert end.error.message == "'json_schema' cannot be used: it takes too much to follow."


def test_a_schema_with_very_many_properties(backend: LlamaBackend) -> None:
    names = [f"property_{i}" for i in range(2000)]
    properties = {name: {"const": 1} for name in names}
    wanted = {"type": "object", "properties": properties, "required": names[-1:]}
    text, _ = generate(backend, schema(wanted), sampling=GREEDY)
    assert re.match(r' ?\{\s*"property_\d+"', text)


def test_a_task_whose_grammar_was_not_compiled_is_refused(backend: LlamaBackend) -> None:
    engine = Engine(backend, DecodeMaximal(), lambda: None)
    with pytest.raises(TrioServeError, match="not compiled"):
        engine.check(Task(1, Prompt((5,)), GenerationParams(grammar=Grammar("regex", "a"))))


def test_a_constraint_of_something_else_is_refused(backend: LlamaBackend) -> None:
    from trioserve.types import Constraint

    with pytest.raises(TypeError):
        backend.sampler(GREEDY, (), Constraint(Grammar("regex", "a")))
