"""Which parameters of tools are text, by their schemas."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def texts_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, bool]]:
    """Say for each tool and parameter whether it is text; those that may be either are left out."""
    found = {}
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            continue
        parameters = function.get("parameters")
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping):
            kinds = {key: _is_text(schema) for key, schema in properties.items()}
            name = str(function.get("name", ""))
            found[name] = {key: kind for key, kind in kinds.items() if kind is not None}
    return found


def _is_text(schema: object) -> bool | None:
    """Whether a value of this schema is a string; None when it may or may not be."""
    if not isinstance(schema, Mapping):
        return None
    if "const" in schema:
        return isinstance(schema["const"], str)
    if isinstance(schema.get("enum"), list):
        return _agreed([isinstance(value, str) for value in schema["enum"]])
    kinds = schema.get("type")
    if isinstance(kinds, str):
        return kinds == "string"
    if isinstance(kinds, list):
        return _agreed([kind == "string" for kind in kinds])
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            return _agreed([_is_text(part) for part in schema[word]])
    return None


def _agreed(verdicts: list[bool] | list[bool | None]) -> bool | None:
    return verdicts[0] if verdicts and len(set(verdicts)) == 1 else None
