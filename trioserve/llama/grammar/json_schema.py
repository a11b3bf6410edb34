"""JSON Schemas: which of them llguidance can enforce, and which part of one it cannot."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from time import monotonic
from typing import Any

from trioserve.chat.grammar.keywords import PARTLY, REFUSED
from trioserve.chat.grammar.plain import plain
from trioserve.chat.grammar.schemas import MAX_DEPTH, NAMED, is_too_deep, moved

_MAX_TEXT = 2**18  # characters
_MAX_REQUIRED = 2500  # names in all lists of required properties; the time grows with their square
#: The time to compile grows with the square of this: 0.7 s for this many properties in an object.
#: Compiling recurses too, see `STACK`.
_MAX_SCHEMAS = 2500
_LOCATE_SECONDS = 0.25

_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLES = ("items", "additionalItems", "additionalProperties")


class UnusableError(Exception):
    """The grammar cannot be used. The message is a part of a sentence.

    Args:
        problem: a description of the error.
        path: where, in a schema.
        param: which field of the request it is, if it is not that of the grammar.
    """

    def __init__(self, problem: str, path: str = "", param: str = "") -> None:
        super().__init__(f"{problem}, at {path}" if path else problem)
        self.param = param


def read_schema(text: str) -> Any:
    """Read the JSON of a schema, and check it: 262,144 characters, and nested 100 deep, at most.

    Raises:
        UnusableError: it is not JSON, too large, or has an unsupported keyword.
    """
    if len(text) > _MAX_TEXT:
        raise UnusableError(f"it has {len(text)} characters, more than {_MAX_TEXT}")
    try:
        schema = json.loads(text)
    except RecursionError:
        raise UnusableError("it is nested too deeply") from None
    except ValueError as error:
        raise UnusableError(f"it is not JSON: {error}") from None
    return check_schema(schema)


def check_schema(schema: Any) -> Any:
    """Check the bounds of a schema, and that all its keywords can be enforced; `plain` writes it.

    Raises:
        UnusableError: it is too large, or has an unsupported keyword; the message names the
            place.
    """
    if is_too_deep(schema):
        raise UnusableError(f"it is nested more than {MAX_DEPTH} deep")
    if not isinstance(schema, dict | bool):
        raise UnusableError("a schema is an object or a boolean", "#")
    schema = plain(schema, as_json=True)
    n_required = 0
    for count, (path, part) in enumerate(_walk(schema)):
        if count == _MAX_SCHEMAS:
            raise UnusableError(f"it has more than {_MAX_SCHEMAS} schemas in it")
        required = part.get("required") if isinstance(part, dict) else None
        n_required += len(required) if isinstance(required, list) else 0
        if n_required > _MAX_REQUIRED:
            raise UnusableError(f"it requires more than {_MAX_REQUIRED} properties")
        for keyword in part if isinstance(part, dict) else ():
            if keyword in REFUSED or keyword in PARTLY:
                place = f"{path}/{_escape(keyword)}"
                raise UnusableError(f"the keyword '{keyword}' is not supported", place)
    if schema is False:
        raise UnusableError("nothing can follow it", "#")
    return {} if schema is True else schema


def locate(schema: Any, problem: str, ask: Callable[[Any], str]) -> tuple[str, str]:
    """Find the smallest part of a schema that has a problem; gives up after a while.

    The problem of an object that lacks a member is that of the member.

    Args:
        schema: the whole.
        problem: the answer of `ask` for the whole schema.
        ask: describes the error in a schema; empty if it has none.

    Returns:
        A JSON pointer, of the whole schema if no smaller part was found, and the problem there.
    """
    until = monotonic() + _LOCATE_SECONDS
    whole = moved(schema, "#/$defs/_")
    path, part = "#", schema
    while True:
        for child_path, child in _children(path, part):
            if monotonic() > until:
                return path, problem
            found = ask({"$defs": {"_": whole}, "$ref": f"#/$defs/_{child_path[1:]}"})
            if found and (found == problem or "required property" in problem):
                path, part, problem = child_path, child, found
                break
        else:
            return path, problem


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
    for keyword in NAMED:
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


def _escape(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def brief(problem: str) -> str:
    """Shorten an error of llguidance to a part of a sentence, without the drawing below it."""
    lines = [line.strip() for line in problem.splitlines() if line.strip()] or ["unknown error"]
    causes = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    text = f"invalid regex: {causes[-1]}" if causes else lines[0]
    if "Regex is empty" in text:
        text = "no text matches 'pattern', 'format' and the lengths together"
    return text[:300].rstrip(" .:")
