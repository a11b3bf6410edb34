from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.grammar_bench import GREEDY, Bench
from trioserve import llama
from trioserve.config import Config
from trioserve.engine import DecodeMaximal, Engine
from trioserve.errors import EngineError, InvalidRequestError, ServerClosingError, TrioServeError
from trioserve.llama import LlamaBackend
from trioserve.llama.grammar import gbnf, json_schema, matcher
from trioserve.llama.grammar.masks import Mask
from trioserve.types import (
    Failed,
    FinishReason,
    GenerationParams,
    Grammar,
    Prompt,
    SamplingParams,
    Task,
)


@pytest.fixture(scope="module")
def backend() -> Iterator[LlamaBackend]:
    with llama.load(Config(threads=1, ctx_size=4096, parallel=4)) as backend:
        yield backend


def generate(backend: LlamaBackend, wanted: Grammar, **options: Any) -> tuple[str, FinishReason]:
    bench = Bench(backend)
    bench.submit(1, wanted, **options)
    bench.run()
    return bench.text[1], bench.reason(1)


def schema(value: Any, param: str = "response_format") -> Grammar:
    return Grammar("json_schema", json.dumps(value), param=param)


def refusal(backend: LlamaBackend, wanted: Grammar) -> str:
    """What is said against a grammar, which must be quick."""
    backend.compile(Grammar("regex", "warm"))  # the tokenizer is there
    start = time.perf_counter()
    with pytest.raises(InvalidRequestError) as caught:
        backend.compile(wanted)
    assert time.perf_counter() - start < 5
    assert caught.value.param == wanted.param
    assert f"'{wanted.param}'" in caught.value.message
    return caught.value.message


# -- JSON Schema: a small check of values, for the keywords that are used here


def is_valid(value: Any, wanted: dict[str, Any]) -> bool:
    if "enum" in wanted:
        return value in wanted["enum"]
    match wanted["type"]:
        case "object":
            names = set(wanted["properties"])
            return (
                isinstance(value, dict)
                and set(wanted.get("required", ())) <= set(value) <= names
                and all(is_valid(value[name], wanted["properties"][name]) for name in value)
            )
        case "array":
            low, high = wanted.get("minItems", 0), wanted.get("maxItems", 10**9)
            return (
                isinstance(value, list)
                and low <= len(value) <= high
                and all(is_valid(item, wanted["items"]) for item in value)
            )
        case "string":
            return (
                isinstance(value, str)
                and len(value) <= wanted.get("maxLength", 10**9)
                and re.search(wanted.get("pattern", ""), value) is not None
            )
        case "integer" | "number":
            kinds = int if wanted["type"] == "integer" else (int, float)
            return (
                isinstance(value, kinds)
                and not isinstance(value, bool)
                and wanted.get("minimum", -1e99) <= value <= wanted.get("maximum", 1e99)
            )
        case "boolean":
            return isinstance(value, bool)
        case kind:
            raise AssertionError(kind)


def an_object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


SCHEMAS = {
    "enum": {"enum": ["red", "green", 3, None, {"a": [True]}]},
    "object": an_object(
        name={"type": "string", "maxLength": 12}, old={"type": "boolean"}, sort={"enum": ["x", "y"]}
    ),
    "nested": an_object(
        a=an_object(b=an_object(c={"type": "integer", "minimum": 0, "maximum": 9})),
        d={"type": "array", "items": an_object(e={"type": "boolean"}), "maxItems": 2},
    ),
    "array": {
        "type": "array",
        "items": {"type": "integer", "minimum": -5, "maximum": 5},
        "minItems": 3,
        "maxItems": 5,
    },
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3,4}$"},
    "integer": {"type": "integer", "minimum": 17, "maximum": 4321},
    "number": {"type": "number", "minimum": -1.5, "maximum": 2.5},
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize(
    "sampling",
    [
        GREEDY,
        SamplingParams(temperature=1.5, seed=1, top_k=0, top_p=1.0, min_p=0.0),
        SamplingParams(seed=2, typical_p=0.9, repeat_penalty=1.1, dry_multiplier=0.5),
        SamplingParams(seed=3, mirostat=2),
        SamplingParams(seed=4, samplers=("xtc", "top_n_sigma", "min_p"), xtc_probability=1.0),
    ],
    ids=["greedy", "hot", "typical", "mirostat", "xtc"],
)
def test_output_follows_the_schema(
    backend: LlamaBackend, name: str, sampling: SamplingParams
) -> None:
    text, reason = generate(backend, schema(SCHEMAS[name]), sampling=sampling, max_tokens=400)
    if name == "number" and reason is FinishReason.LIMIT:
        return  # digits without end are a number, too
    assert reason is FinishReason.EOS, text
    assert is_valid(json.loads(text), SCHEMAS[name]), text


def test_any_object(backend: LlamaBackend) -> None:
    wanted = Grammar("json_object")
    for seed in range(3):
        sampling = SamplingParams(temperature=1.2, seed=seed)
        text, reason = generate(backend, wanted, sampling=sampling, max_tokens=60)
        assert text.startswith("{")
        assert reason is FinishReason.LIMIT or isinstance(json.loads(text), dict)


def test_references_and_recursion(backend: LlamaBackend) -> None:
    tree = {
        "$defs": {
            "tree": an_object(
                leaf={"type": "boolean"},
                children={"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1},
            )
        },
        "$ref": "#/$defs/tree",
    }
    text, reason = generate(backend, schema(tree), sampling=GREEDY)
    if reason is FinishReason.EOS:
        assert set(json.loads(text)) == {"leaf", "children"}


# -- GBNF and regular expressions

GBNFS = {
    'root ::= "yes" | "no"': "yes|no",
    'root ::= [a-z]* "end"': "[a-z]*end",  # the class could take the end as well
    'root ::= (head "-" tail)\n# a comment\nhead ::= [A-F0-9]{2,4}\ntail ::= head |\n "x" # or\n': (
        "[A-F0-9]{2,4}-([A-F0-9]{2,4}|x)"
    ),
    r'root ::= "\"\\\n\t\x41\u00e9\U0001F600"': '"\\\\\n\tAé😀',
    r"root ::= [\x41\u0042-\U00000044/&&^~\]-]{5}": r"[A-D/&^~\-\]]{5}",
    r"root ::= [^a-z\n]{3}": r"[^a-z\n]{3}",
    "root ::= .{4}": r"(?s:.{4})",
    'root ::= foo-Bar?\nfoo-Bar ::= "a"{0,3} start\nstart ::= "b"\n': "(a{0,3}b)?",
    'root ::= ("a" | "b" ("c" |\n\n "d"))+ "."': r"(a|b[cd])+\.",
}


@pytest.mark.parametrize("source", GBNFS)
def test_gbnf(backend: LlamaBackend, source: str) -> None:
    for sampling in (GREEDY, SamplingParams(temperature=2.0, seed=1, top_k=0)):
        text, reason = generate(backend, Grammar("gbnf", source), sampling=sampling)
        assert reason is FinishReason.LIMIT or re.fullmatch(GBNFS[source], text), text


def allows(backend: LlamaBackend, wanted: Grammar, text: str) -> bool:
    """Whether a grammar allows an output, token by token."""
    matcher = backend.compile(wanted).matcher()
    try:
        for token in backend.vocab.tokenize(text, parse_special=False):
            if token not in matcher.mask():
                return False
            matcher.accept(token)
        return bool(backend.vocab.end_of_generation & set(matcher.mask().ids.tolist()))
    finally:
        matcher.close()


def test_recursive_gbnf(backend: LlamaBackend) -> None:
    wanted = Grammar(
        "gbnf",
        r"""
        root ::= value
        value ::= "[" ws (value ("," ws value)*)? "]" ws | string ws
        string ::= "\"" [^"\\]* "\""
        ws ::= [ \t\n]*
        """.replace("\n        ", "\n"),
    )
    assert allows(backend, wanted, '["a", ["b" , []], "c"]')
    assert not allows(backend, wanted, '["a", ["b" , []], "c"')
    assert not allows(backend, wanted, '["a" "b"]')
    assert not allows(backend, wanted, "")
    parts = Grammar("gbnf", 'root ::= "(" root ")" | [a-z]* "end" [a-z]*')
    assert allows(backend, parts, "((friendly))")
    assert not allows(backend, parts, "((fiendly)")


def test_gbnf_may_name_tokens(backend: LlamaBackend) -> None:
    end, start = backend.vocab.tokenize("<|im_end|><|im_start|>")
    wanted = Grammar("gbnf", 'root ::= <|im_start|> "a" !<|im_start|>')
    matcher = backend.compile(wanted).matcher()
    assert matcher.mask().only == start
    matcher.accept(start)
    (a,) = backend.vocab.tokenize("a")
    assert matcher.mask().only == a
    matcher.accept(a)
    assert start not in matcher.mask() and end not in matcher.mask() and a in matcher.mask()
    same = backend.compile(Grammar("gbnf", f'root ::= <[{start}]> "a" !<[{start}]>'))
    assert same.first.only == start


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("", "there is no rule 'root'"),
        ("root", "'::=' is missing (line 1)"),
        ('root ::= "a', "'\"' is missing"),
        ("root ::= [a", "']' is missing"),
        ("root ::= []", "the character class is empty"),
        ("root ::= [z-a]", "the range from 'z' to 'a' is empty"),
        ('root ::= ("a"', "')' is missing"),
        ('root ::= "a")', "')' is unexpected here"),
        ("root ::= other", "there is no rule 'other' (line 1)"),
        ('root ::= a\na ::= "x"\na ::= "y"', "there are two rules 'a'"),
        (r'root ::= "\q"', "an escape sequence"),
        (r'root ::= "\ud800"', "U+D800 is not a character"),
        ('root ::= "a"{3,2}', "the minimum 3 of a repetition is above its maximum 2"),
        ('root ::= "a"{99999}', "more than 2000 repetitions"),
        ("root ::= <[99999]>", "there is no token 99999"),
        ("root ::= <no such thing>", "there is no token <no such thing>"),
        ("root ::= " + "(" * 40 + '"a"' + ")" * 40, "more than 32 levels of parentheses"),
        ("root ::= " + '"a" ' * 20000, "more than 65536"),
        ("".join(f'r{i} ::= "a"\n' for i in range(2001)), "more than 2000 rules"),
        ("%llguidance {}\nstart: /.*/", "is not the name of a rule"),
    ],
)
def test_broken_gbnf(backend: LlamaBackend, source: str, problem: str) -> None:
    assert problem in refusal(backend, Grammar("gbnf", source))


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet='rot:=ab"[]()|*+?{}1,<>!\\^-.\n #é'))
def test_any_text_is_gbnf_or_refused(text: str) -> None:
    try:
        lark = gbnf.to_lark("root ::= " + text, lambda token, negated: None)
    except gbnf.GbnfError as error:
        said = str(error)
    else:
        said = f"{lark}(line 0)"
        assert lark.startswith("start: ")
    assert "(line " in said


def test_a_regular_expression(backend: LlamaBackend) -> None:
    text, reason = generate(backend, Grammar("regex", "[a-f/]{3}x?"), sampling=GREEDY)
    assert reason is FinishReason.EOS and re.fullmatch("[a-f/]{3}x?", text)
    assert "look-around" in refusal(backend, Grammar("regex", "(?=a)b"))
    assert "65536" in refusal(backend, Grammar("regex", "a" * 70000))


# -- what is refused


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (an_object(a={"not": {"type": "string"}}), "'not' is not supported, at #/properties/a/not"),
        ({"anyOf": [{}, {"uniqueItems": True}]}, "at #/anyOf/1/uniqueItems"),
        ({"type": "array", "items": {"if": {}}}, "at #/items/if"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "contains": {}}, "at #/contains"),
        ({"properties": {"a/b~c": {"propertyNames": {}}}}, "#/properties/a~1b~0c/propertyNames"),
        ({"x-guidance": {"lenient": True}, "type": "string"}, "at #/x-guidance"),
        ({"$defs": {"d": {"unevaluatedItems": False}}}, "at #/$defs/d/unevaluatedItems"),
        (
            an_object(a=an_object(b={"type": "strin"})),
            "Invalid type: strin, at #/properties/a/prop",
        ),
        (an_object(a={"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (an_object(a={"type": "string", "format": "x"}), "Unknown format: x, at #/properties/a"),
        ({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 9}]}, "oneOf"),
        (an_object(a={"$ref": "http://example.com/schema"}), "example.com"),
        (an_object(a={"$ref": "#/$defs/none"}), "/$defs/none"),
        ({"type": "integer", "minimum": 2, "maximum": 1}, "at #"),
        ({"enum": []}, "Unsatisfiable"),
        (False, "nothing can follow it"),
        (5, "a schema is an object or a boolean"),
        ({"enum": ["x" * 300_000]}, "more than 262144"),
        ({"properties": {f"p{i}": {} for i in range(2600)}}, "more than 2500 schemas"),
    ],
)
def test_a_schema_that_cannot_be_enforced(backend: LlamaBackend, value: Any, problem: str) -> None:
    assert problem in refusal(backend, schema(value))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "it is not JSON"),
        ("", "it is not JSON"),
        ('{"a": ' * 50_000, ""),
        ('{"items":' * 120 + "{}" + "}" * 120, "more than 100 deep"),
        ('{"maximum": 1e999}', ""),
        ('{"maximum": ' + "9" * 5000 + "}", ""),
    ],
)
def test_text_that_is_no_schema(backend: LlamaBackend, text: str, problem: str) -> None:
    wanted = Grammar("json_schema", text, param="json_schema")
    assert problem in refusal(backend, wanted)


def test_long_chains_of_references_do_not_end_the_process(backend: LlamaBackend) -> None:
    n = 2400
    chain = {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(n)}
    chain[f"d{n}"] = {"type": "string"}
    value = {"$defs": {f"d{n}": chain.pop(f"d{n}"), **dict(list(chain.items())[-1240:])}}
    value["$ref"] = f"#/$defs/d{n - 1240}"
    backend.compile(schema(value))


def test_an_unknown_keyword_is_an_annotation(backend: LlamaBackend) -> None:
    backend.compile(schema({"type": "string", "title": "T", "x-mine": 1, "maxLength": 3}))
    backend.compile(schema(an_object(**{"not": {"type": "string", "maxLength": 3}})))


@pytest.mark.parametrize(
    ("arguments", "param"),
    [(("xml", ""), "kind"), (("gbnf", 5), "grammar"), (("gbnf", "\ud800"), "grammar")],
)
def test_a_message_that_makes_no_sense(arguments: tuple[Any, ...], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        Grammar(*arguments)
    assert caught.value.param == param


def test_options_take_grammars_only() -> None:
    with pytest.raises(InvalidRequestError):
        GenerationParams(grammar="root ::= x")  # type: ignore[arg-type]
    wanted = Grammar("regex", "a", param="json_schema")
    assert GenerationParams(grammar=wanted).grammar is wanted
    assert wanted == Grammar("regex", "a") and hash(wanted) == hash(Grammar("regex", "a"))


# -- sampling


def test_the_end_comes_only_where_the_grammar_allows_it(backend: LlamaBackend) -> None:
    wanted = Grammar("regex", "a{3,6}")
    eager = tuple((token, 1000.0) for token in backend.vocab.end_of_generation)
    text, reason = generate(backend, wanted, sampling=SamplingParams(logit_bias=eager))
    assert (text, reason) == ("aaa", FinishReason.EOS)
    late = SamplingParams(ignore_eos=True)
    assert generate(backend, wanted, sampling=late) == ("aaaaaa", FinishReason.EOS)


def test_a_bias_that_leaves_nothing(backend: LlamaBackend) -> None:
    ids = {i for i, piece in enumerate(backend.vocab.pieces) if b"b" in piece}
    sampling = SamplingParams(logit_bias=tuple((token, float("-inf")) for token in sorted(ids)))
    bench = Bench(backend)
    bench.submit(1, Grammar("regex", "aab"), sampling=sampling)
    bench.run()
    end = bench.ends[1]
    assert isinstance(end, Failed) and end.error.param == "logit_bias"


def test_probabilities_before_the_samplers_know_no_grammar(backend: LlamaBackend) -> None:
    wanted = Grammar("regex", "[xyz]{2}")
    bench = Bench(backend)
    bench.submit(1, wanted, n_probs=3, sampling=GREEDY)
    bench.submit(2, wanted, n_probs=3, post_sampling_probs=True, sampling=SamplingParams(seed=1))
    bench.submit(3, None, n_probs=3, sampling=GREEDY, max_tokens=1)
    bench.run()
    assert bench.probs[1][0].top == bench.probs[3][0].top
    assert bench.probs[1][0].chosen.piece[:1] in b"xyz"
    for probs in bench.probs[2][:2]:
        assert all(candidate.piece[:1] in b"xyz" for candidate in (probs.chosen, *probs.top))


def test_a_dense_mask_draws_the_same_as_a_sparse_one(backend: LlamaBackend) -> None:
    """Hiding what is forbidden and listing what is allowed are the same to the samplers."""
    wanted = Grammar("regex", r'[^"\\]*')
    (row,) = [backend.batch.clear() or backend.batch.add(5, 0, 0, logits=True)]
    backend.seq_rm(0, 0)
    backend.decode()
    raw = None
    for seed in range(20):
        drawn = []
        for compact in (False, True):
            params = SamplingParams(seed=seed, temperature=1.5)
            with backend.sampler(params, (), backend.compile(wanted)) as sampler:
                logits = sampler._logits(row)
                raw = logits.copy() if raw is None else raw
                sampler._compact = compact
                drawn.append(sampler.sample(row))
                assert (logits == raw).all()
        assert drawn[0] == drawn[1]
    backend.seq_rm(0, 0)


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


def test_four_slots_and_more_tasks(backend: LlamaBackend) -> None:
    bench = Bench(backend)
    names = [name for name in SCHEMAS if name != "number"] * 2
    for task_id, name in enumerate(names):
        sampling = SamplingParams(seed=task_id, temperature=1.0)
        bench.submit(task_id, schema(SCHEMAS[name]), sampling=sampling, max_tokens=400)
    bench.run()
    for task_id, name in enumerate(names):
        assert bench.reason(task_id) is FinishReason.EOS
        assert is_valid(json.loads(bench.text[task_id]), SCHEMAS[name])


def test_a_preempted_task_goes_on_where_it_was(backend: LlamaBackend) -> None:
    bench = Bench(backend)
    bench.submit(1, schema(SCHEMAS["nested"]), sampling=GREEDY)
    bench.run()
    again = Bench(backend)
    again.submit(1, schema(SCHEMAS["nested"]), sampling=GREEDY)
    for _ in range(6):
        again.tick()
    (slot,) = [slot for slot in again.engine._scheduler.slots if slot.run is not None]
    again.engine._scheduler.preempt(slot)
    again.run()
    assert is_valid(json.loads(again.text[1]), SCHEMAS["nested"])
    assert again.text[1] == bench.text[1]


def test_cancelling_in_the_middle(backend: LlamaBackend) -> None:
    bench = Bench(backend)
    for task_id in range(4):
        bench.submit(task_id, Grammar("regex", r"(?s:.*)"), sampling=GREEDY)
    for _ in range(5):
        bench.tick()
    for task_id in range(4):
        bench.engine.cancel(task_id)
    bench.tick()
    assert not bench.engine._scheduler.has_work
    assert generate(backend, Grammar("regex", "abc")) == ("abc", FinishReason.EOS)


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


def test_a_task_whose_grammar_was_not_compiled_is_refused(backend: LlamaBackend) -> None:
    engine = Engine(backend, DecodeMaximal(), lambda: None)
    with pytest.raises(TrioServeError, match="not compiled"):
        engine.submit(Task(1, Prompt((5,)), GenerationParams(grammar=Grammar("regex", "a"))))


def test_a_constraint_of_something_else_is_refused(backend: LlamaBackend) -> None:
    from trioserve.types import Constraint

    with pytest.raises(TypeError):
        backend.sampler(GREEDY, (), Constraint(Grammar("regex", "a")))


# -- compiling


def test_what_was_compiled_is_remembered(backend: LlamaBackend) -> None:
    first = backend.compile(Grammar("regex", "remember"))
    assert backend.compile(Grammar("regex", "remember", param="json_schema")) is first
    for i in range(70):
        backend.compile(Grammar("regex", f"n{i}"))
    assert backend.compile(Grammar("regex", "remember")) is not first


def test_compiling_in_many_threads_at_once(backend: LlamaBackend) -> None:
    wanted = [schema(SCHEMAS[name]) for name in SCHEMAS] * 3
    with ThreadPoolExecutor(4) as pool:
        assert len({id(compiled) for compiled in pool.map(backend.compile, wanted)}) == len(SCHEMAS)


def test_a_closed_model_compiles_nothing() -> None:
    before = set(threading.enumerate())
    with llama.load(Config(threads=1, ctx_size=256, parallel=1)) as backend:
        compiled = backend.compile(Grammar("regex", "abc"))
        sampler = backend.sampler(GREEDY, (), compiled)
        sampler._matcher.accept(compiled.first.ids[0])
    with pytest.raises(ServerClosingError):
        backend.compile(Grammar("regex", "other"))
    assert set(threading.enumerate()) <= before


def test_the_place_of_an_error_is_found_in_bounded_time() -> None:
    asked = 0

    def ask(part: Any) -> str:
        nonlocal asked
        asked += 1
        time.sleep(0.01)
        return "other"

    value = {"properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    assert json_schema.locate(value, "problem", ask) == "#"
    assert 0 < asked < 100
