"""Repairs of tools: pure functions that fill in what a template takes for granted."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trioserve.chat.messages import Tool


def without_nulls(tool: Tool) -> Tool:
    """Leave out null fields, but keep null values of parameters."""
    return {**tool, "function": _without_nulls(tool["function"])}


def _without_nulls(given: Any) -> Any:
    if isinstance(given, list):
        return [_without_nulls(one) for one in given]
    if not isinstance(given, Mapping):
        return given
    return {
        name: one if name in _VALUES else _without_nulls(one)
        for name, one in given.items()
        if one is not None or name in ("const", "default")
    }


#: Keywords of parameters that hold values.
_VALUES = ("const", "default", "enum", "examples")


def described(tool: Tool) -> Tool:
    """Give a function a description."""
    return {**tool, "function": _with_description(tool["function"])}


def with_described_parameters(tool: Tool) -> Tool:
    """Give the parameters of a function descriptions."""
    return _with_parameters(tool, _with_described_properties)


def _with_described_properties(schema: Any) -> Any:
    return _with_properties(
        schema,
        lambda one: (
            _with_description(_with_described_properties(one)) if isinstance(one, Mapping) else one
        ),
    )


def _with_description(given: Mapping[str, Any]) -> dict[str, Any]:
    return {**given, "description": given.get("description", "")}


def completed(tool: Tool) -> Tool:
    """Give the parameters of a function the keywords of an object."""
    keywords = {"type": "object", "properties": {}, "required": []}
    return _with_parameters(tool, lambda given: {**given, **keywords, **given})


def open_objects(tool: Tool) -> Tool:
    """Allow other members, which are strings, in parameters that are objects."""
    return _with_parameters(tool, lambda schema: _with_properties(schema, _opened))


def _opened(schema: Any) -> Any:
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return schema
    others = schema.get("additionalProperties", {"type": "string"})
    return {**_with_properties(schema, _opened), "additionalProperties": others}


def typed(tool: Tool) -> Tool:
    """Give each parameter of a function one type."""
    return _with_parameters(tool, _typed)


def _typed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return {"type": "string"}
    made = _with_properties({**schema, "type": _type_of(schema)}, _typed)
    return {**made, "items": _typed(schema["items"])} if "items" in schema else made


def _with_parameters(tool: Tool, change: Callable[[Any], Any]) -> Tool:
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": change(function["parameters"])}}


def _with_properties(schema: Mapping[str, Any], change: Callable[[Any], Any]) -> Mapping[str, Any]:
    """Change the schema of each property of an object that has some."""
    properties = schema.get("properties")
    if not isinstance(properties, Mapping):
        return schema
    return {**schema, "properties": {name: change(one) for name, one in properties.items()}}


def _type_of(schema: Mapping[str, Any]) -> str:
    """Choose one type for a template."""
    match schema:
        case {"type": str(name)} if name != "null":
            return name
        case {"type": [*names]}:
            found: Iterator[Any] = (name for name in names if isinstance(name, str))
        case {"anyOf": [*others]} | {"oneOf": [*others]} | {"allOf": [*others]}:
            found = (_type_of(one) for one in others if isinstance(one, Mapping))
        case {"enum": [*values]} | {"const": values}:
            values = values if isinstance(values, list) else [values]
            found = (_TYPES.get(type(value), "string") for value in values)
        case {"$ref": _} | {"properties": _}:
            return "object"
        case _:
            return "string"
    return next((name for name in found if name != "null"), "string")


_TYPES: Mapping[type, str] = {
    bool: "boolean",
    int: "integer",
    float: "number",
    dict: "object",
    list: "array",
    type(None): "null",
}
