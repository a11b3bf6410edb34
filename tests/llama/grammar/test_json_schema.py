"""Grammars from JSON Schemas: what they allow, and which are refused."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from tests.support.grammar_bench import (
    GREEDY,
    SCHEMAS,
    an_object,
    generate,
    is_valid,
    refusal,
    schema,
)
from trioserve.llama.backend import LlamaBackend
from trioserve.llama.grammar.compiler import locate
from trioserve.types import FinishReason, Grammar, SamplingParams

HOT = SamplingParams(temperature=1.5, seed=1, top_k=0, top_p=1.0, min_p=0.0)
XTC = ("xtc", "top_n_sigma", "min_p")


@pytest.mark.system
@pytest.mark.parametrize(
    ("name", "sampling"),
    [
        *((name, HOT) for name in SCHEMAS),
        ("nested", GREEDY),
        ("nested", SamplingParams(seed=2, typical_p=0.9, repeat_penalty=1.1, dry_multiplier=0.5)),
        ("object", SamplingParams(seed=3, mirostat=2)),
        ("object", SamplingParams(seed=4, samplers=XTC, xtc_probability=1.0)),
    ],
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
    grammar = Grammar("json_object")
    for seed in range(3):
        sampling = SamplingParams(temperature=1.2, seed=seed)
        text, reason = generate(backend, grammar, sampling=sampling, max_tokens=60)
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


# -- what is refused


@pytest.mark.system
@pytest.mark.parametrize(
    ("value", "problem"),
    [
        (an_object(a={"not": {"type": "string"}}), "'not' is not supported, at #/properties/a/not"),
        ({"anyOf": [{}, {"uniqueItems": True}]}, "at #/anyOf/1/uniqueItems"),
        ({"type": "array", "items": {"if": {}, "then": False}}, "at #/items/if"),
        ({"$schema": "http://json-schema.org/draft-04/schema#", "contains": {}}, "at #/contains"),
        ({"properties": {"a/b~c": {"contains": {}}}}, "#/properties/a~1b~0c/contains"),
        ({"x-guidance": {"lenient": True}, "type": "string"}, "at #/x-guidance"),
        ({"$defs": {"d": {"$recursiveRef": "#"}}}, "at #/$defs/d/$recursiveRef"),
        (
            an_object(a=an_object(b={"type": "strin"})),
            "Invalid type: strin, at #/properties/a/prop",
        ),
        (an_object(a={"type": "string", "pattern": "(?=a)b"}), "look-around"),
        (
            an_object(a={"type": "string", "format": "date", "pattern": "x"}),
            "no text matches 'pattern', 'format' and the lengths together, at #/properties/a",
        ),
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
    grammar = Grammar("json_schema", text, param="json_schema")
    assert problem in refusal(backend, grammar)


@pytest.mark.system
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


@pytest.mark.system
def test_the_place_of_an_error_is_found_in_bounded_time() -> None:
    asked = 0

    def ask(part: Any) -> str:
        nonlocal asked
        asked += 1
        time.sleep(0.01)
        return "other"

    value = {"properties": {f"p{i}": {"type": "string"} for i in range(1000)}}
    assert locate(value, "problem", ask) == ("#", "problem")
    assert 0 < asked < 100
