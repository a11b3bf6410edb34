"""Repairs of tools: pure functions that fill in what a template takes for granted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": _described(function["parameters"])}}


def _described(schema: Any) -> Any:
    if not isinstance(schema.get("properties"), Mapping):
        return schema
    properties = {
        name: _with_description(_described(one)) if isinstance(one, Mapping) else one
        for name, one in schema["properties"].items()
    }
    return {**schema, "properties": properties}


def _with_description(given: Mapping[str, Any]) -> dict[str, Any]:
    return {**given, "description": given.get("description", "")}


def completed(tool: Tool) -> Tool:
    """Give the parameters of a function the keywords of an object."""
    function = tool["function"]
    parameters = dict(function["parameters"])
    for keyword, value in {"type": "object", "properties": {}, "required": []}.items():
        parameters.setdefault(keyword, value)
    return {**tool, "function": {**function, "parameters": parameters}}


def open_objects(tool: Tool) -> Tool:
    """Say of parameters that are objects which other members they have."""
    function = tool["function"]
    parameters = function["parameters"]
    return {**tool, "function": {**function, "parameters": _with_open_properties(parameters)}}


def _with_open_properties(schema: Mapping[str, Any]) -> Mapping[str, Any]:
    if not isinstance(schema.get("properties"), Mapping):
        return schema
    return {
        **schema,
        "properties": {name: _opened(one) for name, one in schema["properties"].items()},
    }


def _opened(schema: Any) -> Any:
    if not isinstance(schema, Mapping) or schema.get("type") != "object":
        return schema
    others = schema.get("additionalProperties", {"type": "string"})
    return {**_with_open_properties(schema), "additionalProperties": others}


def typed(tool: Tool) -> Tool:
    """Give each parameter of a function one type."""
    function = tool["function"]
    return {**tool, "function": {**function, "parameters": _typed(function["parameters"])}}


def _typed(schema: Any) -> Any:
    if not isinstance(schema, Mapping):
        return {"type": "string"}
    made = {**schema, "type": _type_of(schema)}
    if isinstance(schema.get("properties"), Mapping):
        made["properties"] = {name: _typed(one) for name, one in schema["properties"].items()}
    if "items" in schema:
        made["items"] = _typed(schema["items"])
    return made


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
