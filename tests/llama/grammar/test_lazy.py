"""Lazy grammars: after reasoning, or after triggers. On the bundled model."""

from __future__ import annotations

import json
from typing import Any

import attrs
import pytest

from tests.support.engine_events import preempt
from tests.support.families import HARMONY
from tests.support.grammar_bench import GREEDY, Bench
from trioserve.chat.grammar.answer import after_thinking
from trioserve.errors import EngineError, InvalidRequestError
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar.matcher import LazyMatcher, matcher_for
from trioserve.llama.grammar.tokens import Mask
from trioserve.types import (
    Finished,
    FinishReason,
    GenerationParams,
    Grammar,
    Prompt,
    SamplingParams,
    Task,
    Thinking,
    ThinkingBudget,
)

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"a": {"enum": ["x", "y"]}},
        "required": ["a"],
        "additionalProperties": False,
    }
)
THINK = Thinking(start="<think>", end="</think>")
BEGUN = attrs.evolve(THINK, begun=True)


def lazy_schema(**params: Any) -> Grammar:
    return Grammar("json_schema", SCHEMA, **params)


def submit(
    bench: Bench, task_id: int, grammar: Grammar, *, budget: int = -1, **params: Any
) -> None:
    """Ask for a story, with a few words to end its reasoning."""
    closing = bench.backend.vocab.tokenize(" Well.</think>")
    bench.text[task_id], bench.tokens[task_id], bench.probs[task_id] = "", [], []
    limit = ThinkingBudget(thinking=grammar.thinking or BEGUN, n_tokens=budget, closing=closing)
    bench.engine.submit(
        Task(
            task_id,
            Prompt(bench.backend.vocab.tokenize("Once upon a time")),
            GenerationParams(
                **{"max_tokens": 100, "sampling": GREEDY, "grammar": grammar, **params}
            ),
            constraint=bench.backend.compile(grammar),
            budget=limit if budget >= 0 else None,
        )
    )


def generate(backend: LlamaBackend, grammar: Grammar, **params: Any) -> tuple[str, FinishReason]:
    bench = Bench(backend)
    submit(bench, 1, grammar, **params)
    bench.run()
    end = bench.ends[1]
    assert isinstance(end, Finished), end
    return bench.text[1], end.reason


HOT = SamplingParams(seed=1, temperature=1.5)


@pytest.mark.parametrize(
    ("sampling", "n_probs", "post"),
    [(GREEDY, 0, False), (HOT, 3, False), (SamplingParams(seed=2, typical_p=0.8), 3, True)],
)
def test_after_reasoning_comes_what_the_grammar_says(
    backend: LlamaBackend, sampling: SamplingParams, n_probs: int, post: bool
) -> None:
    text, reason = generate(
        backend,
        lazy_schema(thinking=BEGUN),
        budget=5,
        sampling=sampling,
        n_probs=n_probs,
        post_sampling_probs=post,
    )
    thought, marker, answer = text.partition(" Well.</think>")
    assert thought
    assert marker
    assert json.loads(answer)["a"] in ("x", "y")
    assert reason is FinishReason.EOS


def test_what_is_free_is_as_without_a_grammar(backend: LlamaBackend) -> None:
    free, _ = generate(backend, Grammar("regex", r"(?s:.*)"), max_tokens=40)
    for grammar in (lazy_schema(thinking=BEGUN), lazy_schema(triggers=(("<call>",),))):
        text, reason = generate(backend, grammar, max_tokens=40)
        assert (text, reason) == (free, FinishReason.LIMIT)


@pytest.mark.parametrize("required", [False, True])
def test_the_end_before_the_grammar_begins(backend: LlamaBackend, required: bool) -> None:
    ends = tuple((token, 100.0) for token in backend.vocab.end_of_generation)
    sampling = SamplingParams(temperature=0.0, logit_bias=ends)
    grammar = lazy_schema(triggers=(("<call>",),), required=required)
    text, reason = generate(backend, grammar, sampling=sampling, max_tokens=10)
    assert (reason is FinishReason.LIMIT) == required
    assert bool(text) == required
    # Without triggers all of it is the grammar's, reasoning apart.
    _, reason = generate(backend, lazy_schema(thinking=BEGUN), sampling=sampling, max_tokens=10)
    assert reason is FinishReason.LIMIT


def test_triggers_come_one_after_another(backend: LlamaBackend) -> None:
    grammar = lazy_schema(triggers=((",",), (" a", " the")))
    text, reason = generate(backend, grammar)
    start = text.index("{")
    assert json.loads(text[start:])["a"] in ("x", "y")
    assert text[:start].endswith((" a", " the"))
    assert "," in text[:start]
    assert reason is FinishReason.EOS


def biased(token: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, logit_bias=((token, 1000.0),))


def named(backend: LlamaBackend, name: bytes) -> int:
    return backend.vocab.names.index(name)


def test_a_token_that_goes_beyond_the_marker(backend: LlamaBackend) -> None:
    """The rest is the grammar's; if it cannot be, another token is chosen."""
    names = backend.vocab.names
    whole = next(name for name in names if len(name) > 3 and name.isalpha())
    marker, more = whole[:-1].decode(), whole[-1:].decode()
    token = names.index(whole)
    fits = Grammar("regex", f"{more}!?", triggers=((marker,),))
    text, reason = generate(backend, fits, sampling=biased(token))
    assert (text, reason) == (whole.decode(), FinishReason.EOS) or text == f"{whole.decode()}!"
    refuses = Grammar("regex", "[0-9]", triggers=((marker,),))
    for params in ({}, {"n_probs": 2}, {"n_probs": 2, "post_sampling_probs": True}):
        text, reason = generate(backend, refuses, sampling=biased(token), max_tokens=5, **params)
        assert whole.decode() not in text


def test_blanks_between_the_marker_and_the_grammar(backend: LlamaBackend) -> None:
    names = backend.vocab.names
    token = next((i for i, name in enumerate(names) if name == b".\n"), None)
    if token is None:
        pytest.skip("no such token")
    grammar = Grammar("regex", "[0-9]", triggers=((".",),))
    text, _ = generate(backend, grammar, sampling=biased(token))
    assert text.startswith(".\n")
    assert text[2:].isdecimal()


def test_newlines_after_reasoning_are_free(backend: LlamaBackend) -> None:
    sampling = biased(named(backend, b"\n"))
    text, reason = generate(backend, Grammar("regex", "[0-9]"), sampling=sampling)
    assert text.isdecimal()
    text, reason = generate(
        backend, Grammar("regex", "[0-9]", thinking=BEGUN), budget=0, sampling=sampling
    )
    assert text.startswith(" Well.</think>\n\n")
    assert text.removeprefix(" Well.</think>\n\n").isdecimal()
    assert reason is FinishReason.EOS


# -- reasoning that may begin, or not


def test_the_answer_may_come_at_once(backend: LlamaBackend) -> None:
    sampling = biased(named(backend, b"{"))
    text, reason = generate(backend, lazy_schema(thinking=THINK), sampling=sampling)
    assert json.loads(text)["a"] in ("x", "y")
    assert reason is FinishReason.EOS


def test_or_reasoning_comes_first(backend: LlamaBackend) -> None:
    compiled = backend.compile(lazy_schema(thinking=THINK))
    matcher = matcher_for(compiled)
    assert isinstance(matcher, LazyMatcher)
    for token in backend.vocab.tokenize("<think>"):
        assert token in allowed(matcher)
        assert matcher.accept(token)
    story = backend.vocab.tokenize(" Once, {} or }</think>")
    for token in story:
        assert token in allowed(matcher)
        assert matcher.accept(token)
    assert named(backend, b"a") not in allowed(matcher)
    for token in backend.vocab.tokenize('\n\n{"a":"x"}'):
        assert token in allowed(matcher)
        assert matcher.accept(token)
    assert set(allowed(matcher).ids) == set(backend.vocab.end_of_generation)
    matcher.close()


def allowed(matcher: LazyMatcher) -> Mask:
    mask = matcher.mask()
    assert mask is not None
    return mask


def test_the_beginning_of_a_marker_leads_to_all_of_it(backend: LlamaBackend) -> None:
    matcher = matcher_for(
        backend.compile(lazy_schema(thinking=Thinking(start="thought:", end=".")))
    )
    assert isinstance(matcher, LazyMatcher)
    names = backend.vocab.names
    assert matcher.accept(named(backend, b"t"))
    rest = {names[token] for token in allowed(matcher).ids}
    assert b"h" in rest
    assert all(b"hought:".startswith(name) or name.startswith(b"hought:") for name in rest)
    matcher.close()


def spell(backend: LlamaBackend, matcher: LazyMatcher, text: str) -> None:
    for byte in text.encode():
        assert named(backend, bytes([byte])) in allowed(matcher)
        assert matcher.accept(named(backend, bytes([byte])))


@pytest.mark.parametrize(
    ("pattern", "marker", "text", "names"),
    [
        ("tt", "txy", "", {b"t"}),
        ("tt", "txy", "t", {b"t", b"x"}),
        ("tt", "txy", "tt", set()),  # the grammar, to its end
        ("tt", "txy", "txyabc.tt", set()),  # it begins again after reasoning
        ("[a-z][a-z][a-z]", "tx", "txt", set()),  # the grammar allows the marker, too
    ],
)
def test_reasoning_and_a_grammar_that_begin_alike(
    backend: LlamaBackend, pattern: str, marker: str, text: str, names: set[bytes]
) -> None:
    grammar = Grammar("regex", pattern, thinking=Thinking(start=marker, end="."))
    matcher = matcher_for(backend.compile(grammar))
    assert isinstance(matcher, LazyMatcher)
    spell(backend, matcher, text)
    found = {backend.vocab.names[token] for token in allowed(matcher).ids}
    assert {name for name in found if len(name) == 1} == names
    if not names:
        assert set(allowed(matcher).ids) == set(backend.vocab.end_of_generation)
    matcher.close()


def test_channels(backend: LlamaBackend) -> None:
    grammar = after_thinking(lazy_schema(), HARMONY, None, "auto")
    matcher = matcher_for(backend.compile(grammar))
    assert isinstance(matcher, LazyMatcher)
    spell(
        backend,
        matcher,
        "<|channel|>analysis<|message|>{} final<|end|><|start|>assistant"
        "<|channel|>final <|constrain|>json",
    )
    assert not set(allowed(matcher).ids) & backend.vocab.end_of_generation
    spell(backend, matcher, "<|message|>")
    assert named(backend, b"a") not in allowed(matcher)
    spell(backend, matcher, '{"a":"y"}')
    assert set(allowed(matcher).ids) == set(backend.vocab.end_of_generation)
    matcher.close()


# -- errors


def test_the_end_is_not_accepted_where_it_may_not_be(backend: LlamaBackend) -> None:
    matcher = matcher_for(backend.compile(lazy_schema(thinking=BEGUN)))
    with pytest.raises(EngineError):
        matcher.accept(min(backend.vocab.end_of_generation))
    matcher.close()
    matcher = matcher_for(backend.compile(lazy_schema(triggers=(("x",),))))
    assert matcher.accept(min(backend.vocab.end_of_generation))
    matcher.close()


def test_a_grammar_whose_beginning_is_forbidden_is_refused(backend: LlamaBackend) -> None:
    with pytest.raises(InvalidRequestError):
        matcher_for(
            backend.compile(Grammar("regex", "@", triggers=(("x",),))),
            [i for i, name in enumerate(backend.vocab.names) if name.startswith(b"@")],
        )


@pytest.mark.parametrize("triggers", [("x",), (("",),), ((),), [["x"]]])
def test_triggers_are_checked(triggers: Any) -> None:
    with pytest.raises(InvalidRequestError):
        Grammar("json_object", triggers=triggers)


def test_a_forced_token_that_the_grammar_does_not_allow(backend: LlamaBackend) -> None:
    sampler = backend.sampler(GREEDY, [1], backend.compile(lazy_schema()))
    with pytest.raises(EngineError):
        sampler.accept(named(backend, b"a"))
    sampler.close()
    with pytest.raises(EngineError):
        sampler.accept(named(backend, b"{"))


# -- in company


def test_neighbours_with_and_without(backend: LlamaBackend) -> None:
    alone = {}
    tasks: dict[int, dict[str, Any]] = {
        1: {"grammar": lazy_schema(thinking=BEGUN), "budget": 7},
        2: {"grammar": lazy_schema(triggers=((",",),))},
        3: {"grammar": lazy_schema()},
        4: {"grammar": lazy_schema(thinking=THINK), "sampling": SamplingParams(seed=5)},
    }
    for task_id, each in tasks.items():
        alone[task_id], _ = generate(backend, **each)
    bench = Bench(backend)
    for task_id, each in tasks.items():
        submit(bench, task_id, **each)
    bench.run()
    assert bench.text == alone


def test_preempted_tasks_go_on(backend: LlamaBackend) -> None:
    whole, _ = generate(backend, lazy_schema(thinking=BEGUN), budget=7)
    bench = Bench(backend)
    submit(bench, 1, lazy_schema(thinking=BEGUN), budget=7)
    for _ in range(40):
        if bench.step():
            slots = bench.engine._scheduler.slots
            busy = next((slot for slot in slots if slot.request is not None), None)
            if busy is not None and busy.in_decode:
                preempt(bench.engine, busy)
    bench.run()
    assert bench.text[1] == whole
