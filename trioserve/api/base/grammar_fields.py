"""What an output must look like: ``grammar``, ``json_schema`` or ``response_format``."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from trioserve.api.base.fields import json_type
from trioserve.errors import InvalidRequestError
from trioserve.types import Grammar

_FORMATS = ("text", "json_object", "json_schema")


@json_type(
    properties={
        "grammar": {"type": "string"},
        "json_schema": {"type": ["object", "boolean"]},
        "response_format": {"type": "object"},
    }
)
def read_grammar(body: Mapping[str, Any]) -> Grammar | None:
    """Read what the output must look like; None where any text will do.

    Raises:
        InvalidRequestError: a field is wrong, or more than one says something.
    """
    grammars = [
        grammar
        for name, read in _READERS.items()
        if (value := body.get(name)) is not None and (grammar := read(value, name)) is not None
    ]
    if len(grammars) > 1:
        first, second = grammars[0].param, grammars[1].param
        raise InvalidRequestError(f"'{first}' and '{second}' exclude each other.", param=second)
    return grammars[0] if grammars else None


def _gbnf(value: Any, name: str) -> Grammar | None:
    if not value:
        return None
    if not isinstance(value, str):
        raise InvalidRequestError(f"'{name}' must be text, in GBNF.", param=name)
    return Grammar("gbnf", value, param=name)


def _schema(value: Any, name: str) -> Grammar:
    if not isinstance(value, dict | bool):
        raise InvalidRequestError(f"The schema in '{name}' must be an object.", param=name)
    return Grammar("json_schema", json.dumps(value), param=name)


def _response_format(value: Any, name: str) -> Grammar | None:
    if not isinstance(value, dict) or value.get("type") not in _FORMATS:
        raise InvalidRequestError(
            f"'{name}' must be an object with a type: {', '.join(_FORMATS)}.", param=name
        )
    if value["type"] == "text":
        return None
    if value["type"] == "json_object":
        schema = value.get("schema")
        return Grammar("json_object", param=name) if schema is None else _schema(schema, name)
    inner = value.get("json_schema", value)
    if not isinstance(inner, dict) or "schema" not in inner:
        raise InvalidRequestError(
            f"'{name}' of type json_schema needs 'json_schema' with a 'schema'.", param=name
        )
    return _schema(inner["schema"], name)


_READERS: Mapping[str, Callable[[Any, str], Grammar | None]] = {
    "grammar": _gbnf,
    "json_schema": _schema,
    "response_format": _response_format,
}
