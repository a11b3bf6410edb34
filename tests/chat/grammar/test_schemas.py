"""Schemas of strict tools that cannot be enforced: they are refused, and the error says where."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support import families
from tests.support.message_writers import WRITERS
from tests.support.tool_grammars import (
    AUTO,
    NOTATIONS,
    REQUIRED,
    TOOLS,
    compiled,
    strict,
    taking,
    tool,
)
from trioserve.chat.formats.syntax import ChatFormat
from trioserve.chat.grammar.answer import constrain
from trioserve.chat.grammar.plain import plain
from trioserve.errors import InvalidRequestError
from trioserve.llama.backend import LlamaBackend
from trioserve.types import Grammar


@pytest.mark.system
@pytest.mark.parametrize(
    "name", ["hermes", "qwen3-coder", "kimi-k3", "minimax-m3", "lfm2", "gemma-4"]
)
@pytest.mark.parametrize(
    ("parameters", "where"),
    [
        ({"type": "string"}, ""),
        ({"type": "object", "properties": {"a": {"not": {}}}, "required": ["a"]}, "a"),
        ({"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}, "a"),
        ({"type": "object", "properties": {"a": {"type": "string", "pattern": "("}}}, "a"),
        ({"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}}, "a"),
        ({"type": "object", "properties": {"a": False}, "required": ["a"]}, "a"),
        ({"type": "object", "properties": {"a": {"type": "text"}}, "required": ["a"]}, "a"),
    ],
    ids=str,
)
def test_schemas_that_are_refused(
    backend: LlamaBackend, name: str, parameters: dict[str, Any], where: str
) -> None:
    tools = [tool("stop"), *strict(tool("f", parameters))]
    for choice in (AUTO, REQUIRED):
        with pytest.raises(InvalidRequestError) as caught:
            grammar = constrain(WRITERS[name].format, tools, choice, parallel=True)
            compiled(backend, grammar)
        path = "tools[1].function.parameters"
        assert caught.value.param in (path, f"{path}.properties.{where}")
        assert str(caught.value.param) in caught.value.message


def test_what_only_narrows_arguments_is_left_out_unless_the_function_is_strict(
    backend: LlamaBackend,
) -> None:
    parameters = {
        "type": "object",
        "properties": {
            "not": {"type": "array", "items": {"type": "string"}, "uniqueItems": True},
            "b": {"type": "integer", "not": {"const": 3}, "examples": [{"not": 1}]},
        },
        "if": {"required": ["b"]},
        "then": {"required": ["not"]},
        "required": ["b"],
    }
    assert plain(parameters, strict=True) == parameters
    assert plain(parameters, strict=False) == {
        "type": "object",
        "properties": {
            "not": {"type": "array", "items": {"type": "string"}},
            "b": {"type": "integer", "examples": [{"not": 1}]},
        },
        "required": ["b"],
    }
    for name in NOTATIONS:
        tools = [tool("f", parameters)]
        compiled(backend, constrain(WRITERS[name].format, tools, REQUIRED, parallel=True))


DEEP: Any = {"type": "integer"}
for _ in range(60):
    DEEP = {"type": "array", "items": DEEP}


@pytest.mark.parametrize(
    ("name", "schema", "problem"),
    [
        ("qwen3-coder", {"enum": ["</parameter>"]}, "no value that this model can write"),
        ("qwen3-coder", {"type": "string", "maxLength": -1}, "'maxLength' must be an integer"),
        ("qwen3-coder", {"type": "string", "minLength": "1"}, "'minLength' must be an integer"),
        ("qwen3-coder", {"type": "string", "pattern": 5}, "'pattern' must be text"),
        ("qwen3-coder", {"type": "string", "pattern": "(" * 4000}, "not a regular expression"),
        ("qwen3-coder", {"type": "string", "pattern": "a^b"}, "anchors at its ends only"),
        ("qwen3-coder", {"type": "string", "pattern": "^a|b$"}, "anchors at its ends only"),
        ("qwen3-coder", {"type": "string", "pattern": "a\\b"}, "anchors at its ends only"),
        ("qwen3-coder", {"type": "string", "pattern": "(?!a)b"}, "look around or back"),
        ("qwen3-coder", {"type": "string", "pattern": "(a)\\1"}, "look around or back"),
        (
            "qwen3-coder",
            {"minLength": 2, "anyOf": [{"type": "string"}, {"type": "null"}]},
            "'anyOf' cannot have limits beside it",
        ),
        (
            "qwen3-coder",
            {"type": "string", "allOf": [{"minLength": 1}, {"maxLength": 2}]},
            "'allOf' is not supported here",
        ),
        ("minimax-m3", {"enum": ["]<]minimax[>[</a>"]}, "no value that this model can write"),
        ("gemma-4", {"enum": ['<|"|>']}, "cannot write such a text"),
        ("gemma-4", {"enum": [{'<|"|>': 1}]}, "cannot write such a name"),
        ("gemma-4", {"type": "array", "prefixItems": [{}]}, "'prefixItems' is not supported"),
        ("gemma-4", {"type": "array", "minItems": 1.5}, "must be integers"),
        ("gemma-4", {"type": "array", "minItems": 3, "maxItems": 2}, "is less than 'minItems'"),
        ("gemma-4", {"allOf": [{}, {}]}, "'allOf' is not supported here"),
        ("gemma-4", {"anyOf": [{}], "minimum": 5}, "cannot have 'minimum' beside it"),
        ("gemma-4", DEEP, "nested too deeply"),
        ("gemma-4", {"type": "object", "maxProperties": 1}, "'maxProperties' is not supported"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_a_notation_has_no_room_for(
    backend: LlamaBackend, name: str, schema: Any, problem: str
) -> None:
    grammar = constrain(WRITERS[name].format, strict(*taking(schema)), AUTO, parallel=True)
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        compiled(backend, grammar)
    assert str(caught.value.param).startswith("tools[0].function.parameters.properties.a")


@pytest.mark.parametrize(
    ("name", "parameters", "problem"),
    [
        ("qwen3-coder", {"properties": {"a>b": {}}}, "cannot write such a name"),
        ("minimax-m3", {"properties": {"a>b": {}}}, "cannot write such a name"),
        ("gemma-4", {"properties": {'<|"|>': {}}}, "cannot write such a name"),
        ("minimax-m3", {}, "arguments must be in 'properties'"),
        ("qwen3-coder", {"anyOf": [{"properties": {}}]}, "'anyOf' is not supported for an object"),
        ("qwen3-coder", {"required": ["a"]}, "'a' must be in 'properties'"),
        ("qwen3-coder", {"properties": []}, "'properties' is malformed"),
        ("hermes", {"properties": {"a": {"enum": "abc"}}}, "'enum' is malformed"),
        ("hermes", {"required": ["a", 5]}, "'required' is malformed"),
    ],
    ids=str,
)
def test_arguments_that_a_notation_has_no_room_for(
    backend: LlamaBackend, name: str, parameters: dict[str, Any], problem: str
) -> None:
    tools = strict(tool("f", parameters))
    grammar = constrain(WRITERS[name].format, tools, AUTO, parallel=True)
    with pytest.raises(InvalidRequestError, match=problem) as caught:
        compiled(backend, grammar)
    assert str(caught.value.param).startswith("tools[0].function.parameters")


@pytest.mark.parametrize(
    ("format", "name"),
    [
        (families.GLM, "two words"),
        (families.QWEN3_CODER, "a>"),
        (families.KIMI_K2, "f:1"),
        (families.HARMONY, "fn é"),
        (families.FUNCTIONARY_3_2, "all"),
        (families.HERMES, ""),
    ],
)
def test_names_that_a_model_cannot_write(format: ChatFormat, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="cannot write") as caught:
        constrain(format, [tool("stop"), tool(name)], REQUIRED, parallel=True)
    assert caught.value.param == "tools[1].function.name"


@pytest.mark.parametrize("kind", ["gbnf", "regex"])
def test_a_grammar_beside_tools(kind: str) -> None:
    answer = Grammar(kind, "x", param="grammar")
    with pytest.raises(InvalidRequestError, match="together with 'tools'") as caught:
        constrain(families.HERMES, TOOLS, AUTO, parallel=True, answer=answer)
    assert caught.value.param == "grammar"


@pytest.mark.parametrize("source", ["{", '{"a":' * 200 + "1" + "}" * 200, "[" * 100_000])
def test_an_answer_whose_schema_is_none(source: str) -> None:
    answer = Grammar("json_schema", source, param="response_format")
    with pytest.raises(InvalidRequestError) as caught:
        constrain(families.HERMES, TOOLS, AUTO, parallel=True, answer=answer)
    assert caught.value.param == "response_format"


@pytest.mark.parametrize("tools", [TOOLS, [tool(f"t{i}") for i in range(60)]], ids=len)
def test_the_schema_of_an_answer_is_not_relaxed(backend: LlamaBackend, tools: list[Any]) -> None:
    schema = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
    answer = Grammar("json_schema", json.dumps(schema), param="response_format")
    grammar = constrain(families.HERMES, tools, AUTO, parallel=True, answer=answer)
    with pytest.raises(InvalidRequestError, match="oneOf") as caught:
        compiled(backend, grammar)
    assert caught.value.param == "response_format"


def test_tools_that_are_not_json() -> None:
    deeper: Any = []
    for _ in range(100_000):
        deeper = [deeper]
    for parameters, param in (
        ({"a": object()}, "tools"),
        ({"a": deeper}, "tools"),
        ("x", "tools[0].function.parameters"),
    ):
        with pytest.raises(InvalidRequestError) as caught:
            constrain(families.HERMES, [tool("f", parameters)], AUTO, parallel=True)
        assert caught.value.param == param


def test_a_schema_that_is_nested_too_deeply(backend: LlamaBackend) -> None:
    deep: Any = {}
    for _ in range(150):
        deep = {"type": "object", "properties": {"a": deep}}
    tools = [tool("f", {"type": "object", "default": [deep]})]
    compiled(backend, constrain(families.HERMES, tools, AUTO, parallel=True))
    with pytest.raises(InvalidRequestError, match="nested") as caught:
        compiled(backend, constrain(families.HERMES, strict(*tools), AUTO, parallel=True))
    assert caught.value.param == "tools[0].function.parameters"


BACK = {"d0": {"anyOf": [{"$ref": "#/$defs/d0"}] * 2 + [{"type": "string"}]}}
CHAIN = {f"d{i}": {"anyOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(60)}
LONG = {f"d{i}": {"oneOf": [{"$ref": f"#/$defs/d{i + 1}"}, {}]} for i in range(300)}


@pytest.mark.system
@pytest.mark.parametrize("definitions", [BACK, {**CHAIN, "d60": {"type": "string"}}, LONG])
def test_references_that_lead_to_one_schema_in_many_ways(
    backend: LlamaBackend, definitions: dict[str, Any]
) -> None:
    tools = taking({"$ref": "#/$defs/d0"})
    tools[0]["function"]["parameters"]["$defs"] = definitions
    compiled(backend, constrain(families.QWEN3_CODER, tools, REQUIRED, parallel=False))
