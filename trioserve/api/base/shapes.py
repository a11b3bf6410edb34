"""What an output must look like, read from JSON."""

from __future__ import annotations

import json
from typing import Any

from trioserve.errors import InvalidRequestError
from trioserve.types import Grammar


def grammar(name: str, value: Any) -> Grammar | None:
    """Read ``grammar``, ``json_schema`` or ``response_format``; None where any text will do."""
    if name == "grammar":
        if not isinstance(value, str):
            raise InvalidRequestError("'grammar' must be text, in GBNF.", param=name)
        return Grammar("gbnf", value, param=name)
    if name == "json_schema":
        return _schema(value, name)
    if not isinstance(value, dict) or value.get("type") not in _FORMATS:
        kinds = ", ".join(_FORMATS)
        raise InvalidRequestError(
            f"'response_format' must be an object with a type: {kinds}.", param=name
        )
    if value["type"] == "text":
        return None
    if value["type"] == "json_object":
        schema = value.get("schema")
        return Grammar("json_object", param=name) if schema is None else _schema(schema, name)
    inner = value.get("json_schema", value)
    if not isinstance(inner, dict) or "schema" not in inner:
        raise InvalidRequestError(
            "'response_format' of type json_schema needs 'json_schema' with a 'schema'.",
            param=name,
        )
    return _schema(inner["schema"], name)


_FORMATS = ("text", "json_object", "json_schema")


def _schema(value: Any, param: str) -> Grammar:
    if not isinstance(value, dict | bool):
        raise InvalidRequestError(f"The schema in '{param}' must be an object.", param=param)
    return Grammar("json_schema", json.dumps(value), param=param)
