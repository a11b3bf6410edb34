"""Lark and structural tags: outputs follow them, and what cannot be enforced is refused."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

from tests.support.grammar_bench import generate, refusal
from trioserve.chat.grammar.structural import structural_grammar
from trioserve.errors import InvalidRequestError
from trioserve.llama.backend import LlamaBackend
from trioserve.types import FinishReason, Grammar, SamplingParams

pytestmark = pytest.mark.system


def follows(backend: LlamaBackend, grammar: Grammar, text: str) -> bool:
    """Return True if a grammar allows a text, and the end of the output after it."""
    matcher = backend.compile(grammar).matcher()  # type: ignore[attr-defined]
    llguidance = matcher._matcher
    tokens = backend._compiler._tokens.split(text.encode())
    return (
        llguidance.validate_tokens(tokens) == len(tokens)
        and (not tokens or llguidance.consume_tokens(tokens))
        and llguidance.is_accepting()
    )


# -- Lark

SQL = """
start: "SELECT " column " FROM " NAME (" WHERE " column " = " NUMBER)?
column: NAME   // a comment with %json {
NAME: /[a-z]{1,8}/
NUMBER: /[0-9]{1,3}/
"""


def test_lark(backend: LlamaBackend) -> None:
    grammar = Grammar("lark", SQL)
    assert follows(backend, grammar, "SELECT a FROM t WHERE b = 12")
    assert not follows(backend, grammar, "SELECT a FROM")
    text, reason = generate(backend, grammar)
    assert reason is FinishReason.EOS
    assert re.fullmatch(r"SELECT [a-z]{1,8} FROM [a-z]{1,8}( WHERE [a-z]{1,8} = \d{1,3})?", text)


def test_lark_nests_rules_and_schemas(backend: LlamaBackend) -> None:
    nested = Grammar("lark", 'start: "(" start ")" | /[0-9]/')
    assert follows(backend, nested, "((7))") and not follows(backend, nested, "((7)")
    schema = json.dumps({"enum": ["a", 3]})
    with_json = Grammar("lark", f'start: "x=" %json {schema} ";"')
    assert follows(backend, with_json, 'x="a";') and not follows(backend, with_json, 'x="b";')


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("start: nothing", "nothing"),
        ("start", "Expected token"),
        ('start: %json {"not": {"type": "null"}}', "'not' is not supported, at #/not"),
        ('start: %json {"x-guidance": {"lenient": true}}', "x-guidance"),
        ('start: %json {"a"', "not JSON"),
        ("start: %json " + '{"items":' * 500 + "{}" + "}" * 500, "nested more than 100 deep"),
        ("start: <|no_such_token|>", "no token <|no_such_token|>"),
        ("start: <[99999999]>", "no token"),
        ("start: <[1-5]>", "name one token"),
        ('start[temperature=0.5]: "a"', "'temperature'"),
        ('start[stop="b"]: /.*/', "'stop'"),
        ("start[max_tokens=5]: /.*/", "'max_tokens'"),
        ('%llguidance {"allow_invalid_utf8": true}\nstart: "a"', "%llguidance"),
        ('start: "' + "a" * 70_000 + '"', "65536"),
        ("start: A\nA: " + " & ".join(f"/(a|b)*a(a|b){{{n}}}/" for n in range(10, 40)), "time"),
    ],
)
def test_lark_that_cannot_be_enforced(backend: LlamaBackend, source: str, problem: str) -> None:
    assert problem in refusal(backend, Grammar("lark", source, param="guided_grammar"))


def test_texts_and_comments_in_lark_are_no_directives(backend: LlamaBackend) -> None:
    grammar = Grammar("lark", 'start: "stop = <a> %json {" /<b>|%json/ # max_tokens = <c>')
    assert follows(backend, grammar, "stop = <a> %json {<b>")


def test_a_regular_expression_may_have_anchors(backend: LlamaBackend) -> None:
    assert follows(backend, Grammar("regex", "^a+$"), "aa")
    assert follows(backend, Grammar("regex", r"a\$"), "a$")
    assert follows(backend, Grammar("regex", r"a\\$"), "a\\")


def test_names_of_rules_in_gbnf_may_have_underscores(backend: LlamaBackend) -> None:
    grammar = Grammar("gbnf", 'root ::= one_thing\none_thing ::= "a"')
    assert follows(backend, grammar, "a")


# -- structural tags


def tag(**format: Any) -> Grammar:
    return structural_grammar({"type": "structural_tag", "format": format}, "structural_tag")


def call(name: str, schema: Any) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema}
    return {"begin": f"<function={name}>", "content": content, "end": "</function>"}


NUMBER = {
    "type": "object",
    "properties": {"n": {"type": "integer"}},
    "required": ["n"],
    "additionalProperties": False,
}
CALLS = {
    "type": "triggered_tags",
    "triggers": ["<function="],
    "tags": [call("f", NUMBER), call("g", {"enum": ["x"]})],
}


@pytest.mark.parametrize(
    ("options", "text", "fits"),
    [
        ({}, "", True),
        ({}, "Well: no < function.", True),
        ({}, 'Well: <function=f>{"n":5}</function> and <function=g>"x"</function>.', True),
        ({}, 'Well: <function=f>{"n":"5"}</function>', False),
        ({}, 'Well: <function=f>{"n":5}', False),
        ({}, "Well: <function=h>", False),
        ({"at_least_one": True}, "Well", False),
        ({"at_least_one": True}, '<function=g>"x"</function>', True),
        ({"stop_after_first": True}, 'a <function=g>"x"</function>', True),
        ({"stop_after_first": True}, 'a <function=g>"x"</function> b', False),
        ({"excludes": ["no"]}, "yes", True),
        ({"excludes": ["no"]}, "not", False),
    ],
)
def test_triggered_tags(
    backend: LlamaBackend, options: dict[str, Any], text: str, fits: bool
) -> None:
    assert follows(backend, tag(**CALLS, **options), text) is fits


def test_the_older_form(backend: LlamaBackend) -> None:
    structures = [{"begin": "<function=f>", "schema": NUMBER, "end": "</function>"}]
    given = {"type": "structural_tag", "structures": structures, "triggers": ["<function="]}
    grammar = structural_grammar(given, "structural_tag")
    assert follows(backend, grammar, 'So <function=f>{"n":5}</function>')
    assert not follows(backend, grammar, "So <function=f>5</function>")


@pytest.mark.parametrize(
    ("format", "texts", "others"),
    [
        ({"type": "const_string", "value": "a/b"}, ["a/b"], ["a", ""]),
        ({"type": "any_text"}, ["", "a\nb"], []),
        ({"type": "any_text", "excludes": ["b"]}, ["a\n"], ["ab"]),
        ({"type": "regex", "pattern": "[a/]{2}"}, ["a/"], ["a"]),
        (
            {
                "type": "or",
                "elements": [
                    {"type": "regex", "pattern": "a"},
                    {"type": "const_string", "value": "b"},
                ],
            },
            ["a", "b"],
            ["ab", ""],
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "any_text"},
                    {"type": "const_string", "value": "."},
                    {"type": "regex", "pattern": "[0-9]+"},
                ],
            },
            ["ab.12", ".1"],
            ["ab", "ab.x", "a.b.1"],
        ),
        (
            {
                "type": "sequence",
                "elements": [
                    {"type": "regex", "pattern": "[a-z]*"},
                    {"type": "const_string", "value": "end"},
                ],
            },
            ["weekend", "end"],
            ["week"],
        ),
        (
            {"type": "tag", "begin": "<", "content": {"type": "any_text"}, "end": [">", "]"]},
            ["<a>", "<a]"],
            ["<a", "<a>b]"],
        ),
        (
            {
                "type": "tag",
                "begin": "<",
                "content": {"type": "regex", "pattern": ".*"},
                "end": ">",
            },
            ["<a>", "<a>b>"],
            ["<a"],
        ),
        (
            {
                "type": "tags_with_separator",
                "separator": ",",
                "at_least_one": True,
                "tags": [call("f", NUMBER), call("g", {"enum": ["x"]})],
            },
            ['<function=g>"x"</function>,<function=f>{"n":1}</function>'],
            ["", '<function=g>"x"</function>,'],
        ),
    ],
)
def test_formats(
    backend: LlamaBackend, format: dict[str, Any], texts: list[str], others: list[str]
) -> None:
    grammar = tag(**format)
    assert [follows(backend, grammar, text) for text in texts] == [True] * len(texts)
    assert [follows(backend, grammar, text) for text in others] == [False] * len(others)


def test_a_model_writes_a_tag(backend: LlamaBackend) -> None:
    small = {**NUMBER, "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}}}
    tags = [call("f", small), call("g", {"enum": ["x"]})]
    one: dict[str, Any] = {"tags": tags, "separator": "", "at_least_one": True}
    grammar = tag(type="tags_with_separator", stop_after_first=True, **one)
    text, reason = generate(backend, grammar, sampling=SamplingParams(seed=3))
    assert reason is FinishReason.EOS
    found = re.fullmatch(r'<function=(?:f>(\{.*\})|g>("x"))</function>', text, re.DOTALL)
    assert found is not None and json.loads(found[1] or found[2]) is not None


def test_tags_of_control_tokens(backend: LlamaBackend) -> None:
    names = backend._compiler._tokens.control
    ends = backend.vocab.end_of_generation
    start = next(name for name, token in names.items() if token not in ends)
    format = {"type": "tag", "begin": start, "content": {"type": "any_text"}, "end": "."}
    compiled = backend.compile(tag(**format))
    assert names[start] in compiled.first  # type: ignore[attr-defined]


def test_a_schema_in_a_tag_that_cannot_be_enforced(backend: LlamaBackend) -> None:
    grammar = tag(**{**CALLS, "tags": [call("f", {"not": {"type": "null"}})]})
    with pytest.raises(InvalidRequestError, match="'not' is not supported") as caught:
        backend.compile(grammar)
    assert caught.value.param == "structural_tag.format.tags[0].content.json_schema"
