"""Schemas of tools that a grammar cannot enforce, relaxed until it can.

A tool that is not `strict` is offered whatever its schema holds: the model may never call it, and
the client checks the arguments anyway.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from trioserve.chat.grammar.keywords import FORMATS
from trioserve.chat.grammar.kinds import ANY, TYPES, Shape, resolve, types_of
from trioserve.chat.grammar.plain import plain
from trioserve.chat.grammar.schemas import (
    MAX_LENGTH,
    Part,
    check_is_object,
    check_pattern,
    closed,
    is_too_deep,
    rewritten,
)
from trioserve.errors import InvalidRequestError

#: Bounds on the work: schemas that are looked at, references written out, and levels that are kept.
_MAX_NODES = 5000
_MAX_DEPTH = 40

#: Keywords whose removal leaves types, choices, and the names of members.
_LIMITS = frozenset(
    {
        *("pattern", "minLength", "maxLength", "format", "minItems", "maxItems"),
        *("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"),
    }
)


def as_sent(part: Part) -> Part:
    """Make the arguments of a function from its schema, as it is.

    Raises:
        InvalidRequestError: it is nested too deeply, malformed, or no object.
    """
    if is_too_deep(part.schema):
        raise part.refuse("it is nested too deeply")
    if keyword := _malformed(part.schema):
        raise part.refuse(f"{keyword!r} is malformed")
    return closed(check_is_object(part))


def ladder(part: Part, fits: Callable[[Part], bool]) -> Iterator[tuple[Part, str]]:
    """Give schemas of arguments, each looser than the one before, and a word for what was relaxed.

    `part` is the schema as it was sent; `fits` tells if a grammar can enforce a schema.
    """
    given, param = part.schema, part.param
    if is_too_deep(given):
        return
    try:
        schema = plain(given, strict=False)
        yield as_sent(Part(schema, schema, param)), ""
    except InvalidRequestError:
        pass  # the next one is well-formed, and an object
    try:
        relaxed = _Relaxer(given).arguments()
    except _TooManyError:
        return
    yield _closed(relaxed, param), "keywords"
    if relaxed.get("properties"):
        apart = _apart(relaxed, given, lambda one: fits(_closed(one, param)))
        yield _closed(apart, param), "some arguments"


def _closed(schema: Any, param: str) -> Part:
    return closed(Part(schema, schema, param))


def _apart(
    whole: Mapping[str, Any], given: Any, fits: Callable[[Mapping[str, Any]], bool]
) -> dict[str, Any]:
    """Relax each argument by itself, as far as it must be, for its reader's kinds of values."""
    kept: dict[str, Any] = {}
    known = Shape(given, given)
    for name, schema in whole["properties"].items():
        kinds = known.member(name).kinds
        any_value = {} if kinds == ANY else {"type": types_of(kinds)}
        for choice in (schema, without_limits(schema), any_value):
            alone = {**whole, "properties": {name: choice}, "required": [name]}
            if fits({**alone, "additionalProperties": False}):
                kept[name] = choice
                break
    required = [name for name in whole.get("required", ()) if name in kept]
    return {**whole, "properties": kept, "required": required}


def without_limits(schema: Any) -> Any:
    """Leave out limits of texts, numbers and lists, of a schema that is relaxed."""
    return rewritten(
        schema,
        lambda parts, _: {key: part for key, part in parts.items() if key not in _LIMITS},
    )


# -- the form of values of keywords


def _is_schema(value: Any) -> bool:
    return isinstance(value, Mapping | bool)


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 2**53 and math.isfinite(value)


def _are_schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(_is_schema(one) for one in value)


def _are_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, str) for one in value)


def _are_named(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_is_schema(one) for one in value.values())


_SHAPES: Mapping[str, Callable[[Any], bool]] = {
    "$ref": lambda value: isinstance(value, str),
    "type": lambda value: isinstance(value, str) or (_are_strings(value) and bool(value)),
    "enum": lambda value: isinstance(value, list) and bool(value),
    "properties": _are_named,
    "patternProperties": _are_named,
    "$defs": _are_named,
    "definitions": _are_named,
    "additionalProperties": _is_schema,
    "required": _are_strings,
    "items": lambda value: _is_schema(value) or _are_schemas(value),
    "prefixItems": _are_schemas,
    "allOf": _are_schemas,
    "anyOf": _are_schemas,
    "oneOf": _are_schemas,
}


def _malformed(schema: Any) -> str:
    """Name a keyword whose value has the wrong type, so that nothing can rely on it; or nothing."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if not isinstance(part, Mapping):
            continue
        for key, value in part.items():
            if (is_valid := _SHAPES.get(key)) is None:
                continue
            if not is_valid(value):
                return str(key)
            if isinstance(value, list):
                waiting += value
            elif isinstance(value, Mapping):
                waiting += [value] if key in ("items", "additionalProperties") else value.values()
    return ""


# -- relaxing


class _TooManyError(Exception):
    """A schema has too many parts, once its references are written out."""


class _Relaxer:
    """Writes a schema again, in keywords that every notation can enforce.

    There are types, enums, members, items, limits, and ``anyOf`` with nothing beside it. References
    lead to ``$defs``.
    """

    def __init__(self, root: Any) -> None:
        self._root = root
        self._definitions: dict[str, Any] = {}
        self._names: dict[str, str] = {}  # of definitions, by the references to them
        self._targets: dict[str, Any] = {}  # definitions that are not written yet
        self._n_left = _MAX_NODES

    def arguments(self) -> dict[str, Any]:
        """Write the schema of a function's arguments, an object, or raise _TooManyError."""
        flat = self._flat(self._root, ())
        alternatives = self._alternatives(flat)
        flat = self._united(flat, alternatives) if alternatives else flat
        made = self._object({**flat, "type": "object"}, 0)
        while self._targets:
            name, schema = self._targets.popitem()
            self._definitions[name] = self._node(schema, 0)
        return {**made, "$defs": self._definitions} if self._definitions else made

    def _node(self, schema: Any, depth: int) -> Any:
        """Write a schema; an empty one allows any value."""
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
            return {}
        self._count()
        if isinstance(schema.get("$ref"), str) and not _known(schema).keys() - {"$ref"}:
            return self._reference(schema["$ref"])
        flat = self._flat(schema, ())
        if alternatives := self._alternatives(flat):
            return self._choice(flat, alternatives, depth)
        for word in ("const", "enum"):
            if word in flat:
                return {word: flat[word]}
        kinds = flat.get("type")
        parts = [
            self._object(flat, depth)
            if {"properties", "additionalProperties"} & flat.keys()
            else {},
            self._array(flat, depth) if "items" in flat or "prefixItems" in flat else {},
            _limits(flat),
        ]
        made = {key: value for part in parts for key, value in part.items()}
        return made if kinds is None else {"type": kinds, **made}

    def _count(self, n: int = 1) -> None:
        self._n_left -= n
        if self._n_left < 0:
            raise _TooManyError

    def _reference(self, target: str) -> Any:
        if target not in self._names:
            found = resolve({"$ref": target}, self._root)
            if not isinstance(found, Mapping) or not _known(found).keys() - {"$ref"}:
                return {}
            self._names[target] = name = f"d{len(self._names)}"
            self._targets[name] = found
        return {"$ref": f"#/$defs/{self._names[target]}"}

    def _flat(self, schema: Any, seen: tuple[str, ...]) -> dict[str, Any]:
        """Join what a schema refers to, except `seen` references, and the parts of ``allOf``."""
        self._count()
        if not isinstance(schema, Mapping) or len(seen) > _MAX_DEPTH:
            return {}
        flat = _known(schema)
        target, parts = flat.pop("$ref", None), flat.pop("allOf", [])
        if target is not None and target not in seen:
            found = resolve({"$ref": target}, self._root)
            if found != {"$ref": target}:
                flat = _joined(flat, self._flat(found, (*seen, target)))
        for part in parts:
            flat = _joined(flat, self._flat(part, (*seen, "")))
        return flat

    def _alternatives(self, flat: dict[str, Any]) -> list[Any]:
        """Take the alternatives out of a schema. Those of a second keyword are dropped."""
        found = [flat.pop(word, None) for word in ("anyOf", "oneOf")]
        return found[0] or found[1] or []

    def _choice(self, base: dict[str, Any], alternatives: list[Any], depth: int) -> Any:
        flats = [self._flat(one, ()) for one in alternatives]
        if base and all(flat.keys() <= {"required", "properties"} for flat in flats):
            return self._node(self._united(base, alternatives), depth + 1)
        made: list[Any] = []
        for flat, one in zip(flats, alternatives, strict=True):
            node = self._node(_joined(flat, base) if base else one, depth + 1)
            if node == {}:
                return {}
            made += node.get("anyOf", [node])
        unique = [one for i, one in enumerate(made) if one not in made[:i]]
        return unique[0] if len(unique) == 1 else {"anyOf": unique}

    def _united(self, base: dict[str, Any], alternatives: list[Any]) -> dict[str, Any]:
        """Make one object that allows the members of all alternatives."""
        flats = [self._flat(one, ()) for one in alternatives]
        members: dict[str, list[Any]] = {}
        for flat in (base, *flats):
            for name, schema in flat.get("properties", {}).items():
                members.setdefault(name, []).append(schema)
        united = dict(base)
        if members:
            united["properties"] = {
                name: ways[0] if all(way == ways[0] for way in ways) else {"anyOf": ways}
                for name, ways in members.items()
            }
        needed = [set(flat.get("required", ())) for flat in flats]
        also = set.intersection(*needed)
        required = base.get("required", [])
        united["required"] = [*required, *sorted(also.difference(required))]
        if "additionalProperties" not in base:
            others = [flat.get("additionalProperties") for flat in flats]
            if all(one is False for one in others):
                united["additionalProperties"] = False
        return united

    def _object(self, flat: Mapping[str, Any], depth: int) -> dict[str, Any]:
        properties = {
            name: self._node(schema, depth + 1)
            for name, schema in flat.get("properties", {}).items()
            if schema is not False
        }
        made: dict[str, Any] = {"type": flat.get("type", "object")}
        others = flat.get("additionalProperties")
        by_pattern = list(flat.get("patternProperties", {}).values())
        if by_pattern and others in (None, False):
            others = by_pattern[0] if others is False and len(by_pattern) == 1 else True
        if others is not None:
            made["additionalProperties"] = (
                self._node(others, depth + 1) if isinstance(others, Mapping) else others
            )
        required = dict.fromkeys(flat.get("required", ()))
        self._count(len(required))
        if others is not False:
            properties |= {name: {} for name in required if name not in properties}
        if properties:
            made["properties"] = properties
        if needed := [name for name in required if name in properties]:
            made["required"] = needed
        return made

    def _array(self, flat: Mapping[str, Any], depth: int) -> dict[str, Any]:
        items, first = flat.get("items"), flat.get("prefixItems")
        if isinstance(items, list):
            first, items = items, flat.get("additionalItems")
        if first is not None:
            ways = [*first, *([items] if isinstance(items, Mapping) else [])]
            items = {} if items is True else {"anyOf": ways}
        return {"items": self._node(items, depth + 1)}


#: The keywords that are kept, and which values.
_KEPT: Mapping[str, Callable[[Any], bool]] = {
    **{key: is_valid for key, is_valid in _SHAPES.items() if key not in ("$defs", "definitions")},
    **dict.fromkeys([*_LIMITS, "const", "additionalItems"], lambda _: True),
    **dict.fromkeys(["properties", "patternProperties"], lambda one: isinstance(one, Mapping)),
}


def _known(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Take those keywords of a schema that are well-formed, and that a grammar can enforce."""
    kept: dict[str, Any] = {}
    for key, value in schema.items():
        if key == "required" and isinstance(value, list):
            kept[key] = [name for name in value if isinstance(name, str)]
        elif key in _KEPT and _KEPT[key](value):
            kept[key] = value
    if "type" in kept:
        given = kept.pop("type")
        kinds = [given] if isinstance(given, str) else given
        kinds = list(dict.fromkeys(kind.lower() for kind in kinds))
        if all(kind in TYPES for kind in kinds):
            kept["type"] = kinds if len(kinds) > 1 else kinds[0]
    for low in ("minimum", "maximum"):
        strict = f"exclusive{low.capitalize()}"
        if kept.get(strict) is True and low in kept:  # as in draft 4
            kept[strict] = kept.pop(low)
    return kept


def _joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """Make a schema of what both allow. Where that cannot be written, the first counts."""
    joined = dict(one)
    for key, value in other.items():
        if key not in joined:
            joined[key] = value
        elif key == "properties":
            both = {
                name: {"allOf": [joined[key][name], value[name]]}
                for name in joined[key]
                if name in value and joined[key][name] != value[name]
            }
            joined[key] = {**joined[key], **value, **both}
        elif key == "required":
            joined[key] = list(dict.fromkeys([*joined[key], *value]))
        elif key == "type":
            joined[key] = _both_types(joined[key], value)
        elif key == "enum":
            joined[key] = [item for item in joined[key] if item in value] or joined[key]
        elif key == "additionalProperties" and joined[key] is not False and value is not True:
            joined[key] = value
    return joined


def _both_types(one: Any, other: Any) -> Any:
    kinds = [one] if isinstance(one, str) else one
    others = [other] if isinstance(other, str) else other
    both = [kind for kind in kinds if kind in others or (kind == "integer" and "number" in others)]
    if not both and "number" in kinds and "integer" in others:
        return "integer"
    return (both if len(both) > 1 else both[0]) if both else one


_BOUNDS = (
    ("minLength", "maxLength", _is_count),
    ("minItems", "maxItems", _is_count),
    ("minimum", "maximum", _is_number),
    ("exclusiveMinimum", "exclusiveMaximum", _is_number),
)


def _limits(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Take the limits that can be enforced, and are not contradictory."""
    made: dict[str, Any] = {}
    for low, high, is_valid in _BOUNDS:
        pair = {key: flat[key] for key in (low, high) if key in flat and is_valid(flat[key])}
        if is_valid is _is_count:
            pair = {key: value for key, value in pair.items() if value <= MAX_LENGTH}
        if len(pair) < 2 or pair[low] <= pair[high]:
            made |= pair
    step = flat.get("multipleOf", 0)
    if _is_number(step) and step > 0:
        made["multipleOf"] = step
    if isinstance(flat.get("format"), str) and flat["format"] in FORMATS:
        made["format"] = flat["format"]
    if "pattern" in flat and not check_pattern(flat["pattern"]):
        made["pattern"] = flat["pattern"]
    return made
