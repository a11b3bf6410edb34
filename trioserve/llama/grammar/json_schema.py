"""JSON Schemas before llguidance sees them: bounds, unsupported keywords, and where errors are.

llguidance says what is wrong with a schema, but not where. `check` finds unsupported keywords, and
`locate` finds the place of any other error by asking about smaller and smaller parts. Places are
JSON pointers from the root: ``#/properties/age/not``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any

_MAX_TEXT = 2**18  # characters
_MAX_DEPTH = 100  # values in values; llguidance's own limit is 127
_MAX_REQUIRED = 2500  # names in all lists of required properties; the time grows with their square
#: The time to compile grows with the square of this: 0.7 s for so many properties in one object.
#: Compiling recurses too, see `compiler.STACK`.
_MAX_SCHEMAS = 2500
_LOCATE_SECONDS = 0.25

#: Keywords of any draft that restrict values and that llguidance cannot enforce. It refuses those
#: of the schema's own draft and silently ignores those of others.
# fmt: off
_UNSUPPORTED = frozenset(
    {
        "$dynamicRef", "$recursiveRef", "contains", "dependencies", "dependentRequired",
        "dependentSchemas", "disallow", "divisibleBy", "else", "extends", "if", "maxContains",
        "minContains", "not", "propertyNames", "then", "unevaluatedItems", "unevaluatedProperties",
        "uniqueItems",
        "x-guidance",  # options of llguidance, which clients may not set
    }
)
# fmt: on
_MAPS = ("properties", "patternProperties", "$defs", "definitions")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = ("items", "additionalItems", "additionalProperties")


class SchemaError(Exception):
    """The schema cannot be used. The message is a part of a sentence."""

    def __init__(self, problem: str, path: str = "") -> None:
        super().__init__(f"{problem}, at {path}" if path else problem)


def read(text: str) -> Any:
    """Read the JSON of a schema, and check it: 262,144 characters, and nested 100 deep, at most.

    Raises:
        SchemaError: it is not JSON, too large, or has an unsupported keyword.
    """
    if len(text) > _MAX_TEXT:
        raise SchemaError(f"it has {len(text)} characters, more than {_MAX_TEXT}")
    try:
        schema = json.loads(text)
    except RecursionError:
        raise SchemaError("it is nested too deeply") from None
    except ValueError as error:
        raise SchemaError(f"it is not JSON: {error}") from None
    check(schema)
    if schema is False:
        raise SchemaError("nothing can follow it", "#")
    return {} if schema is True else schema


def check(schema: Any) -> None:
    """Check the bounds of a schema, and that all its keywords can be enforced.

    Raises:
        SchemaError: it is too large, or has an unsupported keyword; the message names the
            place.
    """
    _check_depth(schema)
    if not isinstance(schema, dict | bool):
        raise SchemaError("a schema is an object or a boolean", "#")
    n_required = 0
    for count, (path, part) in enumerate(_walk(schema)):
        if count == _MAX_SCHEMAS:
            raise SchemaError(f"it has more than {_MAX_SCHEMAS} schemas in it")
        required = part.get("required") if isinstance(part, dict) else None
        n_required += len(required) if isinstance(required, list) else 0
        if n_required > _MAX_REQUIRED:
            raise SchemaError(f"it requires more than {_MAX_REQUIRED} properties")
        for keyword in part if isinstance(part, dict) else ():
            if keyword in _UNSUPPORTED:
                place = f"{path}/{_escape(keyword)}"
                raise SchemaError(f"the keyword '{keyword}' is not supported", place)


def locate(schema: Any, problem: str, ask: Callable[[Any], str]) -> str:
    """Find the smallest part of a schema that has a problem; gives up after a while.

    Args:
        schema: the whole.
        problem: what `ask` says of the whole.
        ask: tells what is wrong with a schema; empty if nothing is.

    Returns:
        A JSON pointer, of the whole schema if no smaller part was found.
    """
    until = monotonic() + _LOCATE_SECONDS
    whole = _moved(schema)
    path, part = "#", schema
    while True:
        for child_path, child in _children(path, part):
            if monotonic() > until:
                return path
            if ask({"$defs": {"_": whole}, "$ref": f"#/$defs/_{child_path[1:]}"}) == problem:
                path, part = child_path, child
                break
        else:
            return path


def _moved(value: Any) -> Any:
    """Copy a schema so that it works as ``#/$defs/_`` of another."""
    if isinstance(value, list):
        return [_moved(item) for item in value]
    if not isinstance(value, dict):
        return value
    copy = {key: _moved(item) for key, item in value.items() if key not in ("$schema", "$id")}
    reference = copy.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        copy["$ref"] = f"#/$defs/_{reference[1:]}"
    return copy


def _walk(schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield a schema and all schemas in it, with their places."""
    waiting = [("#", schema)]
    while waiting:
        path, part = waiting.pop()
        yield path, part
        waiting += _children(path, part)


def _children(path: str, schema: Any) -> Iterator[tuple[str, Any]]:
    if not isinstance(schema, dict):
        return
    for keyword in _MAPS:
        if isinstance(parts := schema.get(keyword), Mapping):
            for name, part in parts.items():
                yield f"{path}/{keyword}/{_escape(name)}", part
    for keyword in _LISTS:
        if isinstance(parts := schema.get(keyword), list):
            for i, part in enumerate(parts):
                yield f"{path}/{keyword}/{i}", part
    for keyword in _SINGLES:
        if isinstance(part := schema.get(keyword), dict | bool):
            yield f"{path}/{keyword}", part


def _check_depth(value: Any) -> None:
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(_MAX_DEPTH):
        values = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for inner in values for v in inner if isinstance(v, dict | list)]
        if not level:
            return
    raise SchemaError(f"it is nested more than {_MAX_DEPTH} deep")


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
