"""Arguments that a model writes as text: which of them are strings, and which are JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trioserve.chat.json_scanner import WHITESPACE, JsonScanner, State

#: References in references that are followed.
_MAX_STEPS = 20

#: What JSON other than a string begins with, and Python's names for some of it.
JSON_BEGINNINGS = frozenset("{[-0123456789tfnTFN")
_WORDS = {"True": "true", "False": "false", "None": "null"}


def texts_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, bool]]:
    """Say for each tool and parameter whether it is text; those that may be either are left out."""
    found = {}
    for tool in tools:
        function = tool.get("function", tool)
        if not isinstance(function, Mapping):
            continue
        root = function.get("parameters")
        parameters = resolve(root, root)
        properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
        if isinstance(properties, Mapping):
            kinds = {key: is_text(schema, root) for key, schema in properties.items()}
            name = str(function.get("name", ""))
            found[name] = {key: kind for key, kind in kinds.items() if kind is not None}
    return found


def is_text(schema: object, root: object = None, depth: int = 0) -> bool | None:
    """Whether a value of this schema, a part of `root`, is a string; None: it may or may not be."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_STEPS:
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
            return _agreed([is_text(part, root, depth + 1) for part in schema[word]])
    return None


def resolve(schema: Any, root: Any) -> Any:
    """Follow a reference to another part of `root`, and a list of one schema to that.

    Gives the schema as it is where a reference leads nowhere.
    """
    for _ in range(_MAX_STEPS):
        if not isinstance(schema, Mapping):
            return schema
        target = _target(schema, root)
        if target is None:
            return schema
        schema = target
    return schema


def _target(schema: Mapping[str, Any], root: Any) -> Any:
    all_of = schema.get("allOf")
    if isinstance(all_of, list) and len(all_of) == 1 and "properties" not in schema:
        return all_of[0]
    reference = schema.get("$ref")
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping) and name in place:
            place = place[name]
        elif isinstance(place, list) and name.isdecimal() and int(name) < len(place):
            place = place[int(name)]
        else:
            return None
    return place


def _agreed(verdicts: list[bool] | list[bool | None]) -> bool | None:
    return verdicts[0] if verdicts and len(set(verdicts)) == 1 else None


def as_json(text: str) -> str:
    """Write a value as JSON: as it is, if it is JSON, and else as a string."""
    bare = text.strip(WHITESPACE)
    if bare in _WORDS:
        return _WORDS[bare]
    if bare and bare[0] in JSON_BEGINNINGS and _is_json(bare):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    scanner = JsonScanner()
    end = scanner.feed(text)
    scanner.finish()
    # The scanner writes control characters as escapes: then the text as it is would be no JSON.
    return scanner.state is State.DONE and end == len(text) and scanner.text == text
