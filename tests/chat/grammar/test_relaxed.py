"""Schemas of tools that no grammar can enforce: relaxed, so that no request fails for them."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from structlog.testing import capture_logs

from tests.support.message_writers import WRITERS
from tests.support.tool_grammars import (
    AUTO,
    REQUIRED,
    compiled,
    read,
    tail_of,
    texts,
    tool,
)
from tests.support.tool_schemas import ARGUMENTS, TOOLS, corpus, obj
from trioserve.chat.grammar.answer import constrain
from trioserve.chat.grammar.kinds import Shape
from trioserve.chat.grammar.plain import plain
from trioserve.chat.grammar.relaxed import as_sent, ladder
from trioserve.chat.grammar.schemas import Part
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar import trial

#: JSON, text between markers, elements, and literals.
SOME = ("hermes", "qwen3-coder", "deepseek-v3.2", "minimax-m3", "gemma-4")


def relaxed(schema: Any, rung: int = 1) -> Any:
    """A schema of the ladder, by its number."""
    rungs = ladder(Part(schema, schema, "x"), lambda _: True)
    return [part.schema for part, _ in rungs][rung]


def argument(schema: Any) -> Any:
    return relaxed(obj(a=schema))["properties"]["a"]


TEXT: dict[str, Any] = {"type": "string"}
WHOLE: dict[str, Any] = {"type": "integer"}


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"oneOf": [TEXT, {"type": "null"}]}, {"anyOf": [TEXT, {"type": "null"}]}),
        ({**TEXT, "maxLength": 524_288}, TEXT),
        ({**TEXT, "pattern": "(?=a)b", "minLength": 2}, {**TEXT, "minLength": 2}),
        ({**TEXT, "pattern": "("}, TEXT),
        ({**TEXT, "pattern": "^a+$"}, {**TEXT, "pattern": "^a+$"}),
        (
            {"allOf": [TEXT, {"maxLength": 5}], "minLength": 1},
            {**TEXT, "minLength": 1, "maxLength": 5},
        ),
        ({"allOf": [{"type": ["string", "null"]}, TEXT]}, TEXT),
        ({"allOf": [{"type": "number"}, WHOLE]}, WHOLE),
        (
            {"minLength": 2, "anyOf": [TEXT, WHOLE]},
            {"anyOf": [{**TEXT, "minLength": 2}, {**WHOLE, "minLength": 2}]},
        ),
        ({"anyOf": [TEXT, {}]}, {}),
        ({**TEXT, "enum": None}, TEXT),
        ({"type": "STRING"}, TEXT),
        ({"type": "text"}, {}),
        ({"$ref": "#/$defs/nowhere"}, {}),
        ({"$ref": "#/$defs/nowhere", **TEXT}, TEXT),
        ({"$ref": f"#/enum/{'9' * 5000}", "enum": ["a"]}, {"enum": ["a"]}),
        ({**WHOLE, "minimum": 3, "exclusiveMinimum": True}, {**WHOLE, "exclusiveMinimum": 3}),
        ({**WHOLE, "minimum": 9, "maximum": 1}, WHOLE),
        (
            ARGUMENTS["pair"],
            {
                "type": "array",
                "items": {"anyOf": [TEXT, {"type": "number"}]},
                "minItems": 2,
                "maxItems": 2,
            },
        ),
        (ARGUMENTS["by pattern"], {"type": "object", "additionalProperties": TEXT}),
        (ARGUMENTS["required null"], obj(a=TEXT)),
        (ARGUMENTS["a property is false"], obj(b=TEXT)),
        (
            ARGUMENTS["closed parts"],
            {**obj("a", a=TEXT, b=WHOLE), "additionalProperties": False},
        ),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_becomes_of_an_argument(schema: Any, expected: Any) -> None:
    assert argument(schema) == expected


def test_alternatives_of_all_arguments_are_joined() -> None:
    made = relaxed(
        {
            "oneOf": [
                {
                    **obj("a", "b", a={"type": "string"}, b={"const": 1}),
                    "additionalProperties": False,
                },
                {**obj("b", b={"const": 2}), "additionalProperties": False},
            ]
        }
    )
    assert made == {
        "type": "object",
        "properties": {"a": {"type": "string"}, "b": {"anyOf": [{"const": 1}, {"const": 2}]}},
        "required": ["b"],
        "additionalProperties": False,
    }
    either = relaxed({**obj(a={}, b={}), "anyOf": [{"required": ["a"]}, {"required": ["b"]}]})
    assert "required" not in either
    assert either["properties"] == {"a": {}, "b": {}}


def test_references_lead_to_definitions() -> None:
    tree = obj(t={"$ref": "#/definitions/Tree"}, u={"$ref": "#/properties/t", "minItems": 1})
    tree["definitions"] = {"Tree": {"type": "array", "items": {"$ref": "#/definitions/Tree"}}}
    made = relaxed(tree)
    assert made["properties"]["t"] == {"$ref": "#/$defs/d0"}
    assert made["properties"]["u"] == {
        "type": "array",
        "items": {"$ref": "#/$defs/d0"},
        "minItems": 1,
    }
    assert made["$defs"] == {"d0": {"type": "array", "items": {"$ref": "#/$defs/d0"}}}


def test_what_is_loose_enough_is_found_for_each_argument() -> None:
    schema = obj(
        "a", "b", "c", a={"type": "string", "pattern": "a+"}, b={"type": "integer"}, c={"enum": [1]}
    )

    def fits(part: Part) -> bool:
        text = json.dumps(part.schema)
        return "pattern" not in text and "integer" not in text

    *_, (last, what) = ladder(Part(schema, schema, "x"), fits)
    assert what == "some arguments"
    kept = last.schema["properties"]
    assert kept["a"] == {"type": "string"}
    assert kept["b"] == {"type": ["object", "array", "number", "boolean", "null"]}
    assert kept["c"] == {"enum": [1]}
    assert last.schema["required"] == ["a", "b", "c"]


def test_a_bomb_is_given_up() -> None:
    links = {f"d{i}": {"allOf": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)}
    schema = {"$defs": links, **obj(a={"$ref": "#/$defs/d0"})}
    assert len(list(ladder(Part(schema, schema, "x"), lambda _: True))) == 1
    many = {"type": "object", "required": [f"k{i}" for i in range(20_000)]}
    assert len(list(ladder(Part(many, many, "x"), lambda _: True))) == 1


@pytest.mark.parametrize("name", sorted(ARGUMENTS))
def test_what_a_reader_looks_for_can_be_written(name: str) -> None:
    """A parser knows the schema that was sent, and no other."""
    schema = obj(a=ARGUMENTS[name])
    known, made = (Shape(each, each) for each in (schema, relaxed(schema)))
    assert known.member("a").kinds & made.member("a").kinds


# -- requests


@pytest.fixture
def no_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """No grammar takes so long here that a process would have to try it."""
    monkeypatch.setattr(trial, "run", lambda *_: None)


def sample() -> dict[str, Any]:
    """All tools, and a few arguments; `make test-schemas` takes all."""
    every = list(corpus().items())
    return dict([*every[: len(TOOLS)], *every[len(TOOLS) :: 13]])


@pytest.mark.usefixtures("no_trials")
@pytest.mark.parametrize("name", SOME)
def test_no_schema_fails_a_request(backend: LlamaBackend, name: str) -> None:
    schemas = list(sample().values())
    for choice in (AUTO, REQUIRED):
        for start in range(0, len(schemas), 40):
            tools = [tool(f"t{i}", schema) for i, schema in enumerate(schemas[start : start + 40])]
            grammar = constrain(WRITERS[name].format, tools, choice, parallel=True)
            compiled(backend, grammar)


_RELAXED = (
    *("oversized", "look-ahead", "kinds", "closed parts", "stages", "odd names", "required null"),
    *("nowhere", "typed enum", "pair", "blocks", "all of two", "upper case"),
)


@pytest.mark.system
@pytest.mark.parametrize("name", sorted({*SOME, "kimi-k3", "glm-4"} - {"minimax-m3"}))
@pytest.mark.parametrize("schema", _RELAXED)
def test_arguments_follow_the_relaxed_schema(backend: LlamaBackend, name: str, schema: str) -> None:
    writer = WRITERS[name]
    tools = [tool("f", corpus()[f"{schema}, needed"])]
    root = tools[0]["function"]["parameters"]
    grammar = constrain(writer.format, tools, REQUIRED, parallel=False, prompt_tail=tail_of(writer))
    for text in texts(backend, grammar, 2, writer.format):
        (call,) = read(text, writer.format, tools, tail_of(writer)).tool_calls
        arguments = json.loads(call.arguments)
        assert "a" in arguments
        jsonschema.validate(arguments, relaxed(root))


@pytest.mark.parametrize("name", SOME)
def test_what_can_be_enforced_is_not_relaxed(backend: LlamaBackend, name: str) -> None:
    plain = ("text", "number", "flag", "choice", "texts", "short", "share", "or null", "rows")
    tools = [tool(f"p{i}", obj("a", a=ARGUMENTS[key])) for i, key in enumerate(plain)]
    with capture_logs() as logs:
        compiled(backend, constrain(WRITERS[name].format, tools, AUTO, parallel=True))
    assert logs == []


@pytest.mark.usefixtures("no_trials")
def test_each_relaxation_is_logged_once(backend: LlamaBackend) -> None:
    tools = [tool("plain", obj(a={"type": "string"}))]
    tools.append(
        tool("logged", obj(a={"type": "string", "pattern": "(?=a)"}, b={"type": "integer"}))
    )
    with capture_logs() as logs:
        for choice in (AUTO, REQUIRED):
            compiled(backend, constrain(WRITERS["kimi-k3"].format, tools, choice, parallel=True))
            compiled(backend, constrain(WRITERS["hermes"].format, tools, choice, parallel=True))
    (entry,) = logs
    assert entry["event"] == "the schema of a tool is relaxed"
    assert (entry["tool"], entry["relaxed"]) == ("logged", "keywords")
    assert "look around" in entry["problem"]


def test_the_last_resort_is_any_arguments(backend: LlamaBackend) -> None:
    deep = TOOLS["deep"]
    for name in SOME:
        tools = [tool(f"free{name}", deep)]
        with capture_logs() as logs:
            grammar = constrain(WRITERS[name].format, tools, REQUIRED, parallel=False)
            compiled(backend, grammar)
        assert [entry["relaxed"] for entry in logs] == ["all arguments"]


def test_a_malformed_schema_is_not_taken_as_sent() -> None:
    for key in ("required null", "no enum", "properties as a list", "a property is null"):
        schema = obj(a=ARGUMENTS[key])
        with pytest.raises(Exception, match="malformed"):
            as_sent(Part(schema, schema, "x"))
    assert plain(obj(a=ARGUMENTS["not"]), strict=False) == obj(a={"type": "string"})
