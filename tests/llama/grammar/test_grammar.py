"""What grammars allow: JSON Schema, GBNF, regular expressions, and what is refused."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from tests.support.grammar_bench import (
    GREEDY,
    SCHEMAS,
    an_object,
    generate,
    is_valid,
    schema,
)
from trioserve.errors import InvalidRequestError
from trioserve.llama import LlamaBackend
from trioserve.llama.grammar import gbnf
from trioserve.types import (
    FinishReason,
    GenerationParams,
    Grammar,
    SamplingParams,
)


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
