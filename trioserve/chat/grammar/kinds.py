"""The kinds of values that a schema allows, and how a value that stands bare in text is read.

Many models write arguments without quotes: only the schema says whether ``42`` is a number or text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import attrs

from trioserve.chat.json_scanner import as_json

#: The types of values.
TYPES = ("string", "object", "array", "integer", "number", "boolean", "null")
#: Any value. Every integer is a number, too.
ANY = frozenset(TYPES)
TEXT = frozenset({"string"})

#: The characters that a value of a kind may begin with, where it is bare.
_BEGINNINGS: Mapping[str, str] = {
    "integer": "-0123456789",
    "number": "-0123456789",
    "boolean": "tfTF",
    "null": "nN",
    "object": "{",
    "array": "[",
}
_CONTAINERS = frozenset({"object", "array"})
#: References in references that are followed.
_MAX_REFERENCES = 20
#: Parts of a schema that are searched for a member.
_MAX_PARTS = 200


def resolve(schema: Any, root: Any) -> Any:
    """Follow a reference to another part of `root`, and a list of one schema to that.

    Gives the schema as it is where a reference leads nowhere.
    """
    for _ in range(_MAX_REFERENCES):
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
    return pointed(schema.get("$ref"), root)


def pointed(reference: object, root: Any) -> Any:
    """Find the schema that a reference leads to; None if it leads nowhere in `root`."""
    if not isinstance(reference, str) or not reference.startswith("#"):
        return None
    place: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        if isinstance(place, Mapping) and name in place:
            place = place[name]
        elif isinstance(place, list) and re.fullmatch("[0-9]{1,9}", name):
            place = place[int(name)] if int(name) < len(place) else None
        else:
            return None
    return place


def kinds_of(schema: object, root: object = None) -> frozenset[str]:
    """Find the kinds of values that a schema, a part of `root`, allows."""
    return _kinds(schema, root, {}, 0)


def _kinds(
    schema: object, root: object, known: dict[int, frozenset[str]], depth: int
) -> frozenset[str]:
    """Look at each schema once: references may lead to one in a million ways."""
    schema = resolve(schema, root)
    if not isinstance(schema, Mapping) or depth > _MAX_REFERENCES:
        return ANY
    if id(schema) in known:
        return known[id(schema)]
    known[id(schema)] = ANY  # for its own parts, which may refer to it
    found = ANY
    if "const" in schema:
        found &= _kinds_of_value(schema["const"])
    if isinstance(schema.get("enum"), list):
        found &= _union(map(_kinds_of_value, schema["enum"]))
    kinds = schema.get("type")
    kinds = kinds if isinstance(kinds, list) else [kinds]
    if all(isinstance(kind, str) and kind.lower() in TYPES for kind in kinds):
        found &= _union(_with_integers(kind.lower()) for kind in kinds)
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            found &= _union(_kinds(part, root, known, depth + 1) for part in schema[word])
    if isinstance(schema.get("allOf"), list):
        for part in schema["allOf"]:
            found &= _kinds(part, root, known, depth + 1)
    known[id(schema)] = found or ANY
    return known[id(schema)]


def types_of(kinds: frozenset[str]) -> str | list[str]:
    """Write kinds as the type of a schema."""
    named = kinds - {"integer"} if "number" in kinds else kinds
    types = [kind for kind in TYPES if kind in named]
    return types if len(types) > 1 else types[0]


def _union(kinds: Iterator[frozenset[str]]) -> frozenset[str]:
    return frozenset().union(*kinds)


def _with_integers(kind: str) -> frozenset[str]:
    return frozenset({"integer", kind} if kind == "number" else {kind})


def _kinds_of_value(value: object) -> frozenset[str]:
    return _kinds_of_json(json.dumps(value))


def _kinds_of_json(text: str) -> frozenset[str]:
    """Find the kinds that a value in JSON is of: an integer is a number, too."""
    if text[0] == '"':
        return TEXT
    found = frozenset(kind for kind, letters in _BEGINNINGS.items() if text[0] in letters)
    if "integer" in found and {*".eE"} & {*text} and not float(text).is_integer():
        return found - {"integer"}
    return found


def begins_text(character: str, kinds: frozenset[str]) -> bool:
    """True if a bare value that begins with a character can only be text."""
    return not any(character in _BEGINNINGS.get(kind, "") for kind in kinds)


def read_bare(text: str, kinds: frozenset[str]) -> str:
    """Write a bare value as JSON: of one of the kinds, or else as a string."""
    if kinds != TEXT:
        written = as_json(text)
        if "string" not in kinds or kinds & _kinds_of_json(written):
            return written
    return json.dumps(text, ensure_ascii=False)


@attrs.frozen(slots=False)
class Shape:
    """The part of a value's schema that its reader needs. References lead into `root`."""

    schema: Any = attrs.field(default=True, eq=False)
    root: Any = attrs.field(default=True, eq=False)

    @cached_property
    def kinds(self) -> frozenset[str]:
        """The kinds that a reader looks for: some and text, or all others."""
        found = kinds_of(self.schema, self.root)
        return found if "string" in found else ANY - TEXT

    @property
    def nests(self) -> bool:
        """True if the value may have values in it."""
        return bool(self.kinds & _CONTAINERS)

    def member(self, key: str) -> Shape:
        return self._of(self._parts(self.schema, "properties", key, set()))

    def item(self) -> Shape:
        return self._of(self._parts(self.schema, "items", None, set()))

    def _of(self, parts: Iterator[Any]) -> Shape:
        found = list(parts)
        if len(found) == 1:
            return Shape(found[0], self.root)
        return Shape({"anyOf": found}, self.root) if found else ANYTHING

    def _parts(self, schema: Any, word: str, key: str | None, seen: set[int]) -> Iterator[Any]:
        """Give the schemas of a member, or of items, in the parts of a schema."""
        schema = resolve(schema, self.root)
        if not isinstance(schema, Mapping) or id(schema) in seen or len(seen) > _MAX_PARTS:
            return
        seen.add(id(schema))
        held = schema.get(word)
        if key is None:
            yield from [held] if isinstance(held, Mapping) else []
        elif isinstance(held, Mapping) and key in held:
            yield held[key]
        elif isinstance(others := schema.get("additionalProperties"), Mapping):
            yield others
        for combined in ("anyOf", "oneOf", "allOf"):
            parts = schema.get(combined)
            for part in parts if isinstance(parts, list) else ():
                yield from self._parts(part, word, key, seen)


ANYTHING = Shape()


def shapes_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Shape]:
    """Give the shapes of the arguments of tools by their names."""
    functions = (tool.get("function", tool) for tool in tools)
    return {
        str(function.get("name", "")): Shape(schema := function.get("parameters"), schema)
        for function in functions
        if isinstance(function, Mapping)
    }
