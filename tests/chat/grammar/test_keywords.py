"""The table of keywords: it is complete, and each keyword does what it says."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema_specifications import REGISTRY  # type: ignore[import-untyped]
from structlog.testing import capture_logs

from trioserve import left_out
from trioserve.chat.grammar.keywords import FORMATS, KEYWORDS, PARTLY, Effect
from trioserve.chat.grammar.plain import plain
from trioserve.errors import InvalidRequestError
from trioserve.llama.backend import LlamaBackend
from trioserve.types import Grammar

#: No keywords of the drafts: of draft 3, and llguidance's.
OTHERS = {"disallow", "divisibleBy", "extends", "x-guidance"}

#: For each keyword that may say nothing: schemas in which it does.
SILENT: dict[str, list[dict[str, Any]]] = {
    "minProperties": [{"minProperties": 0, "properties": {"a": {}}}],
    "propertyNames": [
        {"propertyNames": {"type": "string"}},
        {"propertyNames": {"type": ["string"], "description": "a name"}},
        {"propertyNames": {}},
        {"propertyNames": True},
        {"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"type": "string"}}},
    ],
    "unevaluatedProperties": [
        {"unevaluatedProperties": True},
        {"unevaluatedProperties": {}},
        {"unevaluatedProperties": False, "additionalProperties": {"type": "null"}},
    ],
    "unevaluatedItems": [
        {"unevaluatedItems": True},
        {"unevaluatedItems": False, "items": {"type": "null"}},
        {"unevaluatedItems": False, "items": [{}], "additionalItems": {}},
    ],
    "not": [{"not": False}],
    "if": [{"if": {"required": ["a"]}}, {"if": {"required": ["a"]}, "then": {}, "else": True}],
    "then": [{"then": {"required": ["a"]}}],
    "else": [{"else": {"required": ["a"]}}],
    "contains": [{"contains": {"type": "null"}, "minContains": 0}],
    "minContains": [{"minContains": 0}, {"minContains": 3}],
    "maxContains": [{"maxContains": 1}],
    "uniqueItems": [{"uniqueItems": False}, {"uniqueItems": True, "maxItems": 1}],
    "dependencies": [{"dependencies": {}}, {"dependencies": {"a": [], "b": {}}}],
    "dependentRequired": [
        {"dependentRequired": {}},
        {"dependentRequired": {"a": ["b"]}, "required": ["b"]},
    ],
    "dependentSchemas": [{"dependentSchemas": {}}, {"dependentSchemas": {"a": True}}],
    "$vocabulary": [{"$vocabulary": {}}],
    "$dynamicAnchor": [{"$dynamicAnchor": "node"}],
    "$recursiveAnchor": [{"$recursiveAnchor": True}],
}

#: For each keyword that is refused, or may be: a schema that would be wrong without it.
TELLING: dict[str, dict[str, Any]] = {
    "if": {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "then": {"if": {"required": ["a"]}, "then": {"required": ["b"]}},
    "else": {"if": {"required": ["a"]}, "else": {"required": ["b"]}},
    "contains": {"contains": {"type": "null"}},
    "minContains": {"contains": {"type": "null"}, "minContains": 2},
    "maxContains": {"contains": {"type": "null"}, "maxContains": 2},
    "uniqueItems": {"uniqueItems": True, "maxItems": 2},
    "dependencies": {"dependencies": {f"a{i}": ["b"] for i in range(9)}},
    "dependentRequired": {"dependentRequired": {f"a{i}": ["b"] for i in range(9)}},
    "dependentSchemas": {"dependentSchemas": {f"a{i}": {"required": ["b"]} for i in range(9)}},
    "$dynamicRef": {"$dynamicRef": "#node"},
    "$recursiveRef": {"$recursiveRef": "#"},
    "disallow": {"disallow": "string"},
    "divisibleBy": {"divisibleBy": 2},
    "extends": {"extends": {"type": "string"}},
    "x-guidance": {"x-guidance": {"lenient": True}},
    "not": {"not": {"type": "string"}},
    "propertyNames": {"propertyNames": {"pattern": "^a"}, "properties": {"a": {}}},
    "unevaluatedProperties": {"unevaluatedProperties": False, "anyOf": [{"required": ["a"]}]},
    "unevaluatedItems": {"unevaluatedItems": False, "anyOf": [{"prefixItems": [{}]}]},
}


def drafts() -> set[str]:
    """All keywords that the metaschemas of the drafts define."""
    found: set[str] = set()
    for address in REGISTRY:
        found |= set(REGISTRY.contents(address).get("properties", {}))
    return found


def test_the_table_is_complete() -> None:
    assert drafts() | OTHERS == set(KEYWORDS)
    may_be_silent = {
        name for name, one in KEYWORDS.items()
        if one.silent or (one.effect is Effect.NONE and one.says_nothing({}, {}))
    }  # fmt: skip
    assert may_be_silent == set(SILENT)
    refused = {name for name, one in KEYWORDS.items() if one.effect is Effect.REFUSED}
    assert refused | PARTLY == set(TELLING)


@pytest.mark.parametrize("keyword", sorted(SILENT))
def test_what_says_nothing_is_left_out(backend: LlamaBackend, keyword: str) -> None:
    for schema in SILENT[keyword]:
        assert keyword not in plain(schema)
        backend.compile(Grammar("json_schema", json.dumps({"type": ["object", "array"], **schema})))


@pytest.mark.parametrize("keyword", sorted(TELLING))
def test_what_would_make_the_answer_wrong_is_refused(backend: LlamaBackend, keyword: str) -> None:
    with pytest.raises(InvalidRequestError, match="is not supported, at #/properties/x"):
        schema = {"properties": {"x": TELLING[keyword]}}
        backend.compile(Grammar("json_schema", json.dumps(schema), param="response_format"))


@pytest.mark.parametrize(
    "draft",
    ["http://json-schema.org/draft-04/schema#", "https://json-schema.org/draft/2020-12/schema"],
)
def test_notes_have_no_effect(backend: LlamaBackend, draft: str) -> None:
    notes = {name for name, one in KEYWORDS.items() if one.effect is Effect.NONE}
    places = {"$schema", "$id", "id", "$anchor", "$defs", "definitions"}
    schema = {
        "$schema": draft,
        "properties": {"a": {**dict.fromkeys(notes - places, "x"), "type": "integer"}},
    }
    backend.compile(Grammar("json_schema", json.dumps(schema)))


def test_an_unknown_format_is_an_annotation_and_logged_once(
    backend: LlamaBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(left_out, "_logged", set())
    known = {"type": "string", "format": "date"}
    schema = {
        "properties": {"a": {"type": "string", "format": "e164", "pattern": "^.$"}, "b": known}
    }
    with capture_logs() as logs:
        for _ in range(2):
            assert plain(schema)["properties"] == {
                "a": {"type": "string", "pattern": "^.$"},
                "b": known,
            }
    (entry,) = logs
    assert "e164" in entry["what"]
    for name in FORMATS:
        backend.compile(Grammar("json_schema", json.dumps({"type": "string", "format": name})))
