"""The arguments of a call: a JSON Schema that tells models what they are, and how they are read."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from trioserve.errors import InvalidRequestError

_T = TypeVar("_T")

#: What models have no use for.
_NOISE = frozenset({"title", "default"})


def schema_of(type_: type[msgspec.Struct]) -> dict[str, Any]:
    """The JSON Schema of an object with the fields of a struct; without references."""
    (schema,), parts = msgspec.json.schema_components([type_], ref_template="{name}")
    inlined: dict[str, Any] = _inline(schema, parts)
    return inlined


def _inline(schema: Any, parts: Mapping[str, Any]) -> Any:
    if isinstance(schema, list):
        return [_inline(one, parts) for one in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        struct = _inline(parts[schema["$ref"]], parts)
        del struct["description"]  # the docstring, which is not for models
        return struct
    kept = {key: value for key, value in schema.items() if key not in _NOISE}
    return {key: _inline(value, parts) for key, value in kept.items()}


def read_arguments(type_: type[_T], arguments: Mapping[str, Any]) -> _T:
    """Make a struct of arguments as models write them: a number may be text, and null is nothing.

    A list or an object may be text, too: its JSON, as Claude Desktop is known to send it.

    Raises:
        InvalidRequestError: one is missing or has the wrong type; `param` names it.
    """
    given = {key: value for key, value in arguments.items() if value is not None}
    try:
        return msgspec.convert(given, type_, strict=False)
    except msgspec.ValidationError as error:
        message, param = str(error), _param_of(str(error))
        if param is not None and (value := _unquoted(given.get(param))) is not None:
            return read_arguments(type_, {**given, param: value})
        raise InvalidRequestError(message, param=param) from None
    except UnicodeEncodeError as error:  # of text in the place of something else
        text = _written(error.object)
        param = next((key for key, value in given.items() if text in _written(value)), None)
        raise InvalidRequestError(f"{param} has half of a surrogate pair", param=param) from None


def _unquoted(value: Any) -> Any:
    """The list or the object whose JSON a text is; None: it is none."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return None
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return None


def _written(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _param_of(message: str) -> str | None:
    """The argument that a message of msgspec is about, such as ``edits[0].old_text``."""
    path = re.search(r"- at `\$\.?([^`]*)`$", message)
    missing = re.search(r"required field `([^`]*)`", message)
    names = [found[1].replace("...", "0") for found in (path, missing) if found and found[1]]
    return ".".join(names) or None
