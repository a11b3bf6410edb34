"""The ways to say what an output must look like: each becomes a `Grammar`, or a 400."""

from __future__ import annotations

import json
import re
from typing import Any

import openai
import pytest

from tests.support.clients import client_of, use_openai
from tests.support.scripts import HI
from trioserve.api.base.grammars import read_grammar
from trioserve.errors import InvalidRequestError
from trioserve.testing import ScriptedBackend

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
LARK = 'start: "a" | "b"'
GBNF = 'root ::= "a"'
TAG = {"type": "structural_tag", "format": {"type": "const_string", "value": "x"}}


@pytest.mark.parametrize(
    ("body", "kind", "source"),
    [
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["a.b", "c", "c"]}}, "regex", r"a\.b|c"),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_object", ""),
        ({"structured_outputs": {"grammar": LARK}}, "lark", LARK),
        ({"structured_outputs": {"grammar": GBNF}}, "gbnf", GBNF),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["a"]}, "regex", "a"),
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_json_object": True}, "json_object", ""),
        ({"guided_grammar": LARK, "guided_decoding_backend": "xgrammar"}, "lark", LARK),
        ({"grammar": "%llguidance {}\n" + LARK}, "lark", "%llguidance {}\n" + LARK),
        ({"grammar": GBNF}, "gbnf", GBNF),
        ({"response_format": {"type": "grammar", "grammar": GBNF}}, "gbnf", GBNF),
        (
            {"response_format": {"type": "grammar", "syntax": "regex", "definition": "a+"}},
            "regex",
            "a+",
        ),
    ],
)
def test_each_way_becomes_a_grammar(body: dict[str, Any], kind: str, source: str) -> None:
    grammar = read_grammar(body)
    assert grammar is not None
    assert (grammar.kind, grammar.source) == (kind, source)


@pytest.mark.parametrize(
    "body",
    [
        {"structured_outputs": {"structural_tag": TAG}},
        {"structured_outputs": {"structural_tag": json.dumps(TAG)}},
        {"structural_tag": json.dumps(TAG)},
        {"response_format": TAG},
    ],
)
def test_a_structural_tag_is_an_object_or_json(body: dict[str, Any]) -> None:
    grammar = read_grammar(body)
    assert grammar is not None and grammar.kind == "structural"


@pytest.mark.parametrize("choices", [["a", "ab", "x|y", "(.*)", "a\nb", "é\\d", "a-b&c~d/e"]])
def test_choices_are_escaped(choices: list[str]) -> None:
    grammar = read_grammar({"guided_choice": choices})
    assert grammar is not None
    pattern = re.compile(grammar.source)
    assert all(pattern.fullmatch(choice) for choice in choices)
    assert not any(map(pattern.fullmatch, ["abc", "x", "y", "b", "é1", ""]))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"structured_outputs": 5}, "structured_outputs"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "structured_outputs.regexp"),
        ({"structured_outputs": {"regex": 5}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"choice": [5]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"json_object": "yes"}}, "structured_outputs.json_object"),
        ({"structured_outputs": {"regex": "a", "json": {}}}, "structured_outputs.regex"),
        (
            {"structured_outputs": {"json": {}, "whitespace_pattern": " "}},
            "structured_outputs.whitespace_pattern",
        ),
        (
            {"structured_outputs": {"json": {}, "disable_any_whitespace": True}},
            "structured_outputs.disable_any_whitespace",
        ),
        ({"structured_outputs": {"structural_tag": "{"}}, "structured_outputs.structural_tag"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "response_format"),
        (
            {"response_format": {"type": "grammar", "syntax": "ebnf", "definition": "a"}},
            "response_format.syntax",
        ),
        (
            {"response_format": {"type": "grammar", "syntax": "lark"}},
            "response_format.definition",
        ),
    ],
)
def test_a_refusal_names_the_parameter(body: dict[str, Any], param: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_grammar(body)
    assert caught.value.param == param


async def test_all_three_routes_of_openai_s_sdk_take_structured_outputs() -> None:
    def use(client: openai.OpenAI) -> None:
        more: Any = {"extra_body": {"structured_outputs": {"choice": ["yes", "no"]}}}
        chat = client.chat.completions.create(model="m", messages=HI, **more)
        assert chat.choices[0].message.content == "no"
        assert client.completions.create(model="m", prompt="a", **more).choices[0].text == "no"
        assert client.responses.create(model="m", input="a", **more).output_text == "no"
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(
                model="m", input="a", extra_body={"structured_outputs": {"regex": "("}}
            )
        assert caught.value.param == "structured_outputs.regex"

    backend = ScriptedBackend(lambda prompt: "no", n_ctx=4096)
    await use_openai(backend, use)


async def test_the_responses_api_takes_a_grammar_as_its_format() -> None:
    format = {"type": "grammar", "syntax": "regex", "definition": "(n|o)+"}
    async with client_of(ScriptedBackend(lambda prompt: "no", n_ctx=4096)) as client:
        body = {"input": "a", "text": {"format": format}}
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 200, answer.text
        body = {"input": "a", "text": {"format": {**format, "definition": "("}}}
        answer = await client.post("/v1/responses", json=body)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == "text.format.definition"
