"""Values that stand bare: grammar and parser agree with the schema about their types."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.message_writers import WRITERS, elements
from tests.support.tool_grammars import REQUIRED, allows, read, tail_of, taking
from trioserve.chat.grammar.answer import constrain
from trioserve.chat.grammar.kinds import ANY, Shape, kinds_of, read_bare
from trioserve.llama.backend import LlamaBackend

OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}
REFERS = {"$ref": "#/$defs/T"}

VALUES = [
    (OPTIONAL, {"42": "42", "true": "true", "-1.5e3": "-1.5e3", "{}": "{}", "null": None}),
    ({"type": ["string", "null"]}, {"42": "42", "False": "False", "None": None, "nul": "nul"}),
    ({"type": ["string", "integer"]}, {"42": 42, "true": "true", "null": "null", "[1]": "[1]"}),
    ({"type": ["boolean", "string"]}, {"42": "42", "true": True, "null": "null"}),
    ({"enum": ["42", "true", None]}, {"42": "42", "true": "true", "null": None}),
    (
        {"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
        {"42": "42", "null": "null", '["42"]': ["42"]},
    ),
    ({"type": ["number", "null"]}, {"42": 42, "null": None}),
    ({"anyOf": [{"type": "string", "maxLength": 9}, {"type": "object"}]}, {"1": "1", "{}": {}}),
]
BARE = ("qwen3-coder", "seed-oss", "minimax-m2", "glm-4", "hunyuan-3", "minicpm-5", "minimax-m3")


def written(name: str, value: str) -> str:
    return WRITERS[name].write_calls([("f", {"a": value})]).replace(f"<![CDATA[{value}]]>", value)


@pytest.mark.parametrize("name", BARE)
@pytest.mark.parametrize(("schema", "values"), VALUES, ids=lambda one: str(one)[:40])
def test_grammar_and_parser_agree(
    backend: LlamaBackend, name: str, schema: Any, values: dict[str, Any]
) -> None:
    writer, tools = WRITERS[name], taking(schema)
    tail = tail_of(writer)
    grammar = constrain(writer.format, tools, REQUIRED, parallel=False, prompt_tail=tail)
    for value, expected in values.items():
        text = written(name, value)
        if value not in ("False", "None"):  # which a model may write without a grammar
            assert allows(backend, grammar, text), text
        for pieces in ([text], list(text)):
            (call,) = read(text, writer.format, tools, tail, pieces).tool_calls
            assert json.loads(call.arguments) == {"a": expected}


@pytest.mark.parametrize("name", BARE)
def test_text_may_begin_like_another_value(backend: LlamaBackend, name: str) -> None:
    writer, tools = WRITERS[name], taking({"type": ["string", "integer", "null"]})
    grammar = constrain(writer.format, tools, REQUIRED, parallel=False, prompt_tail=tail_of(writer))
    for value in ("42 apples", "nullable", "-", "4.5.1", "truth", "x42"):
        text = written(name, value)
        assert allows(backend, grammar, text), text
        (call,) = read(text, writer.format, tools, tail_of(writer)).tool_calls
        assert json.loads(call.arguments) == {"a": value}


def test_elements_within_elements() -> None:
    schema = {
        "anyOf": [{"$ref": "#/$defs/T"}, {"type": "null"}],
        "$defs": {"T": {"properties": {"s": OPTIONAL, "l": {"items": {"type": "string"}}}}},
    }
    inner = "#<s>42#</s>#<l>#<item>true#</item>#</l>#<n>42#</n>".replace("#", "]<]minimax[>[")
    text = elements([("f", {"a": inner})])
    tools = taking({key: schema[key] for key in ("anyOf",)})
    tools[0]["function"]["parameters"]["$defs"] = schema["$defs"]
    (call,) = read(text, WRITERS["minimax-m3"].format, tools, "", list(text)).tool_calls
    assert json.loads(call.arguments) == {"a": {"s": "42", "l": ["true"], "n": 42}}


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        (True, ANY),
        ({"type": "any"}, ANY),
        ({"type": "String"}, {"string"}),
        ({"type": "number"}, {"number", "integer"}),
        ({"const": 4.5}, {"number"}),
        ({"enum": [1, True, None, [], {}]}, ANY - {"string"}),
        ({"type": ["string", "null"], "enum": ["a", "b"]}, {"string"}),
        ({"allOf": [{"type": ["string", "null"]}, {"anyOf": [{"type": "null"}, True]}]}, None),
        ({"allOf": [{"type": "string"}, {"type": "null"}]}, ANY),  # of none: it says nothing
        ({"$ref": "#/nowhere"}, ANY),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_kinds_of_a_schema(schema: Any, kinds: Any) -> None:
    assert kinds_of(schema, schema) == (kinds or {"string", "null"})


def test_references_may_lead_back_in_many_ways() -> None:
    root = {"$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}] * 9, "items": {"type": "null"}}}}
    shape = Shape({"$ref": "#/$defs/a"}, root)
    assert shape.kinds == ANY
    assert shape.member("b").kinds == ANY
    assert shape.item().kinds == ANY - {"string"}


def test_shapes_of_parts() -> None:
    root = {
        "additionalProperties": {"type": "string"},
        "properties": {"a": {"items": {"const": 1}}},
    }
    shape = Shape(root, root)
    assert shape.member("b").kinds == {"string"}
    assert shape.member("a").item().kinds == ANY - {"string"}
    assert shape.member("a").member("c").kinds == ANY
    refers = {"$ref": "#"}
    assert Shape(refers, refers).member("a").kinds == ANY


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("1" * 5000, {"string", "integer"}, "1" * 5000),
        ("1e2", {"string", "integer"}, "1e2"),
        ("1e999", {"string", "integer"}, '"1e999"'),
        ("1.5", {"string", "number", "integer"}, "1.5"),
        (" null ", {"string", "null"}, "null"),
        ("one", {"integer"}, '"one"'),
    ],
)
def test_bare_values(text: str, kinds: set[str], value: str) -> None:
    assert read_bare(text, frozenset(kinds)) == value
