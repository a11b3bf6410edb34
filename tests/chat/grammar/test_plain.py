"""Schemas written in keywords that can be enforced: they allow the same."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import jsonschema
import pytest
from hypothesis import given, strategies as st

from trioserve.chat.grammar.plain import plain, without_lookahead

TEXT = {"type": "string"}
A, B, C = {"type": "integer"}, {"type": "null"}, {"type": "boolean"}


def obj(**properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties}


CAT = {**obj(kind={"const": "cat"}, a=A), "required": ["kind"]}
DOG = {**obj(kind={"enum": ["dog", "wolf"]}, b=B), "required": ["kind"]}
LIST = {
    **obj(kind={"const": "list"}, of={"type": "array", "items": {"$ref": "#"}}),
    "required": ["kind"],
}

#: Schemas, and a keyword that is no longer there.
SAME: list[tuple[dict[str, Any], str]] = [
    ({"propertyNames": {"enum": ["a", "b"]}, "additionalProperties": A}, "propertyNames"),
    ({**obj(a=B, c=B), "propertyNames": {"const": "a"}}, "propertyNames"),
    ({"propertyNames": {"pattern": "^a"}, "additionalProperties": A}, "propertyNames"),
    ({"propertyNames": {**TEXT, "minLength": 2}}, "propertyNames"),
    ({"propertyNames": {"$ref": "#/$defs/n"}, "$defs": {"n": {"enum": ["a"]}}}, "propertyNames"),
    ({**obj(a=A), "unevaluatedProperties": False}, "unevaluatedProperties"),
    (
        {**obj(a=A), "allOf": [{"$ref": "#/$defs/p"}], "unevaluatedProperties": B,
         "$defs": {"p": {**obj(b=B), "patternProperties": {"^x": C}}}},
        "unevaluatedProperties",
    ),
    ({"type": "array", "prefixItems": [A], "unevaluatedItems": False}, "unevaluatedItems"),
    ({"type": "array", "unevaluatedItems": A}, "unevaluatedItems"),
    ({"oneOf": [A, TEXT, B]}, "oneOf"),
    ({"oneOf": [CAT, DOG]}, "oneOf"),
    ({"oneOf": [{"allOf": [CAT]}, {"$ref": "#/$defs/d"}], "$defs": {"d": DOG}}, "oneOf"),
    ({"oneOf": [CAT, LIST, B]}, "oneOf"),
    ({**obj(a=A, b=B), "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    ({**obj(a=A, b=B), "dependencies": {"a": {"required": ["c"]}, "b": ["c"]}}, "dependencies"),
    ({"allOf": [{"$ref": "#/$defs/c"}], "description": "x", "$defs": {"c": CAT}}, "allOf"),
    ({"properties": {"a": {"not": {}}, "b": {"not": True}}}, "not"),
]  # fmt: skip

VALUES = st.recursive(
    st.sampled_from([None, True, 1, "x", "cat", "dog", "list"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["a", "b", "c", "ab", "x1", "kind", "of"]), inner, max_size=4
        )
    ),
    max_leaves=6,
)


@pytest.mark.parametrize(("schema", "gone"), SAME, ids=str)
@given(st.data())
def test_the_same_values_are_allowed(schema: Any, gone: str, data: st.DataObject) -> None:
    written = plain(schema)
    assert gone not in written
    value = data.draw(VALUES)
    validators = [jsonschema.Draft202012Validator(one) for one in (schema, written)]
    if "dependencies" in schema:
        validators[0] = jsonschema.Draft7Validator(schema)
    assert len({validator.is_valid(value) for validator in validators}) == 1


@given(VALUES)
def test_exactly_one_of_the_required(value: Any) -> None:
    """Members of two alternatives are not allowed, even where one of them is not complete."""
    schema = {**obj(a=A, b=B), "oneOf": [{"required": ["a"]}, {"required": ["b", "c"]}]}
    written = plain(schema)
    assert "oneOf" not in written
    assert jsonschema.Draft202012Validator(schema).is_valid(value) or not (
        jsonschema.Draft202012Validator(written).is_valid(value)
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"oneOf": [A, {"type": "number"}]},
        {"oneOf": [CAT, obj(kind={"const": "cat"})]},
        {"oneOf": [CAT, {**DOG, "required": []}, {"$ref": "#/nowhere"}]},
        {"oneOf": [obj(kind={"const": "cat"}), obj(kind={"const": "dog"})]},
        {"propertyNames": {"pattern": "^a", "minLength": 2}},
        {"propertyNames": {"type": "integer"}},
        {"propertyNames": {"$ref": "#/propertyNames"}},
        {"unevaluatedProperties": False, "$ref": "#"},
        {"unevaluatedProperties": False, "properties": [A]},
        {"oneOf": [{"$ref": "#"}, {"$ref": "#"}], "allOf": [{"$ref": "#"}, {"$ref": "#"}]},
        {"dependentRequired": 5},
    ],
    ids=str,
)
def test_what_cannot_be_written_otherwise_stays(schema: Any) -> None:
    (word,) = {
        "oneOf",
        "propertyNames",
        "unevaluatedProperties",
        "dependentRequired",
    } & schema.keys()
    assert plain(schema)[word] == schema[word]


def test_work_and_size_are_bounded() -> None:
    names = {"enum": [f"n{i}" for i in range(50)]}
    record = {"propertyNames": names, "additionalProperties": {"description": "x" * 2000}}
    many = {"properties": {f"a{i}": record for i in range(60)}}
    parts = {"allOf": [{"$ref": "#/$defs/a"}] * 50}
    bad = {"$defs": {"a": parts}, "oneOf": [{"$ref": "#/$defs/a"}, parts] * 50}
    start = time.process_time()
    assert len(json.dumps(plain(many))) < 2 * len(json.dumps(many))
    assert plain(bad)["oneOf"]
    for pattern in ("^(?!" + "[" * 4000, "^" + "(?=a)" * 800, "^(?=a)" + "(" * 2000 + ")" * 2000):
        without_lookahead(pattern)
    assert time.process_time() - start < 2


def test_bounds_that_no_number_of_the_grammar_reaches() -> None:
    wide = {"type": "number", "minimum": -3.4e38, "exclusiveMaximum": 1.7e308}
    assert plain(wide) == {**wide, "minimum": -92 * 10**17, "exclusiveMaximum": 92 * 10**17}
    assert plain({"type": "integer", "maximum": 2**64 - 1})["maximum"] == 2**64 - 1


AHEAD = [
    r"^(?=.*[a-c])(?=.*\d)[a-c\d]{2,}$",
    r"^(?!\.)(?!.*\.\.)[ab\.]*@$",
    r"^(?=.{1,3}\.?$)a*\.?$",
    "^(?![ab])c",
    r"^(?!.*[^ab\n])",
    "^(?!@)",
    "^(?=a|b)(?!.*c)",
]


@pytest.mark.parametrize("pattern", AHEAD)
@given(st.text(alphabet="abc.1@\n", max_size=6))
def test_patterns_that_look_ahead(pattern: str, text: str) -> None:
    written = without_lookahead(pattern)
    assert not any("(?=" in one or "(?!" in one for one in written)
    assert bool(re.search(pattern, text)) == all(re.search(one, text) for one in written)


@pytest.mark.parametrize(
    "pattern",
    [
        "a(?=b)",
        "^a(?!b)",
        "^(?=a)b|c$",
        "^(?=a)?b",
        "^(?!ab)",
        "^(?=(?!a)b)c",
        "^(?=a)b(?!c)",
        "^(?=a",
        "^(?<=a)b",
        "^(?!.+a)",
    ],
)
def test_other_patterns_stay(pattern: str) -> None:
    assert without_lookahead(pattern) == [pattern]
