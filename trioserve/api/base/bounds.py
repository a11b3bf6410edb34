"""Checks that values in requests are no longer than their schemas allow.

The schemas are those of ``/openapi.json``; `limits` has the numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from trioserve.errors import InvalidRequestError

#: Keyword of a schema: the most characters of any JSON, roughly.
MAX_CHARS = "x-maxChars"

#: Checks a value at a path. Raises InvalidRequestError, which names the path.
Check: TypeAlias = Callable[[Any, str], None]

_TYPES: Mapping[type, str] = {str: "string", list: "array", dict: "object"}

#: For each type: the keyword of its bound, and what it says of the value and of its parts.
_SIZES: Mapping[type, tuple[str, str, str]] = {
    str: ("maxLength", "a string", "characters"),
    list: ("maxItems", "a list", "items"),
    dict: ("maxProperties", "an object", "fields"),
}


def is_within(value: Any, limit: int) -> bool:
    """Whether JSON has at most `limit` characters: its strings, plus a few for each value."""
    size, values = 0, [value]
    while values and size <= limit:
        value = values.pop()
        size += 2
        if isinstance(value, str):
            size += len(value)
        elif isinstance(value, Mapping):
            values += value
            values += value.values()
        elif isinstance(value, list):
            values += value
    return size <= limit


def check_of(schema: Any) -> Check | None:
    """Make the check of a schema's bounds: of texts, lists and objects. None: it has none."""
    if not isinstance(schema, Mapping):
        return None
    checks = list(_checks_of(schema))
    if not checks:
        return None
    if len(checks) == 1:
        return checks[0]

    def check(value: Any, path: str) -> None:
        for each in checks:
            each(value, path)

    return check


def _checks_of(schema: Mapping[str, Any]) -> Sequence[Check]:
    makers = (_of_length, _of_chars, _of_items, _of_properties, _of_others, _of_choices)
    return [check for make in makers if (check := make(schema)) is not None]


def _of_length(schema: Mapping[str, Any]) -> Check | None:
    limits = {kind: schema[name] for kind, (name, *_) in _SIZES.items() if name in schema}
    if not limits:
        return None

    def check(value: Any, path: str) -> None:
        limit = limits.get(type(value))
        if limit is not None and len(value) > limit:
            _, what, parts = _SIZES[type(value)]
            raise InvalidRequestError.at(path, f"must be {what} of at most {limit} {parts}.")

    return check


def _of_chars(schema: Mapping[str, Any]) -> Check | None:
    if (limit := schema.get(MAX_CHARS)) is None:
        return None

    def check(value: Any, path: str) -> None:
        if not is_within(value, limit):
            raise InvalidRequestError.at(path, f"must have at most {limit} characters as JSON.")

    return check


def _of_items(schema: Mapping[str, Any]) -> Check | None:
    if (inner := check_of(schema.get("items"))) is None:
        return None

    def check(value: Any, path: str) -> None:
        if isinstance(value, list):
            for i, each in enumerate(value):
                inner(each, f"{path}[{i}]")

    return check


def _of_properties(schema: Mapping[str, Any]) -> Check | None:
    properties = schema.get("properties", {})
    inner = {name: found for name, one in properties.items() if (found := check_of(one))}
    if not inner:
        return None

    def check(value: Any, path: str) -> None:
        if isinstance(value, dict):
            for name, each in inner.items():
                if name in value:
                    each(value[name], f"{path}.{name}")

    return check


def _of_others(schema: Mapping[str, Any]) -> Check | None:
    """Check the names and values of an object without known fields."""
    of_names = check_of(schema.get("propertyNames"))
    of_values = check_of(schema.get("additionalProperties"))
    if of_names is None and of_values is None:
        return None

    def check(value: Any, path: str) -> None:
        if not isinstance(value, dict):
            return
        for name, each in value.items():
            if of_names is not None:
                of_names(name, path)
            if of_values is not None:
                of_values(each, f"{path}.{name:.80}")

    return check


def _of_choices(schema: Mapping[str, Any]) -> Check | None:
    """Check that a value is within the bounds of one of several schemas that take its type."""
    choices = [(one, check_of(one)) for one in schema.get("anyOf", ())]
    if not any(check for _, check in choices):
        return None

    def check(value: Any, path: str) -> None:
        kind, problem = _TYPES.get(type(value)), None
        for one, inner in choices:
            if kind not in _types_in(one):
                continue
            if inner is None:
                return
            try:
                inner(value, path)
            except InvalidRequestError as error:
                problem = error
            else:
                return
        if problem is not None:
            raise problem

    return check


def _types_in(schema: Mapping[str, Any]) -> Sequence[str]:
    kinds = schema.get("type", ())
    return [kinds] if isinstance(kinds, str) else kinds
