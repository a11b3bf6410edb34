"""A schema in those keywords that a grammar can enforce, which allows the same values."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from trioserve.chat.grammar.keywords import (
    FORMATS,
    KEYWORDS,
    MAX_BOUND,
    MAX_DEPENDENT,
    NARROWING,
    SAYING,
    says_anything,
)
from trioserve.chat.grammar.kinds import TYPES, pointed
from trioserve.chat.grammar.schemas import is_too_deep, rewritten
from trioserve.left_out import leave_out

#: Keywords that apply other schemas to the same value: always, or if something else holds.
_ALWAYS = ("$ref", "allOf")
_SOMETIMES = frozenset({"anyOf", "oneOf", "if", "dependentSchemas", "$dynamicRef", "$recursiveRef"})
#: The most steps of a proof that alternatives exclude each other.
_MAX_COMPARED = 20_000
_MAX_DEPTH = 20
_DEPENDENT = frozenset({"dependencies", "dependentRequired", "dependentSchemas"})
_MAX_WRITTEN = 2**17  # characters of the members that lists of names become


def plain(schema: Any, *, strict: bool = True, as_json: bool = False) -> Any:
    """Write a schema again, without what says nothing, and in keywords that can be enforced.

    What cannot be written so stays, to be refused.

    Args:
        schema: any; one that is nested too deeply is given back.
        strict: False: leave out keywords that no grammar can enforce, if they only narrow values.
        as_json: llguidance reads it; what looks ahead in patterns is written for it.
    """
    return schema if is_too_deep(schema) else _Writer(schema, strict, as_json).written(schema)


class _Writer:
    def __init__(self, root: Any, strict: bool, as_json: bool) -> None:
        self._root = root
        self._is_strict = strict
        self._is_json = as_json
        self._n_left = _MAX_COMPARED
        self._n_written = 0

    def written(self, schema: Any) -> Any:
        return rewritten(schema, self._changed)

    def _changed(self, parts: dict[str, Any], schema: Mapping[str, Any]) -> Any:
        kept = {
            key: part for key, part in parts.items() if not _is_silent(key, schema[key], schema)
        }
        if says_anything(kept.get("not")):
            return False
        self._combine(kept)
        if self._is_strict:
            self._depend(kept)
        self._name(kept)
        self._close(kept)
        self._bound(kept)
        if self._is_json and isinstance(kept.get("pattern"), str):
            self._look(kept)
        if "$ref" in kept and schema is not self._root:
            # llguidance follows a circular reference only if it stands alone.
            kept = {key: value for key, value in kept.items() if key in KEYWORDS}
        if self._is_strict:
            return kept
        return {key: value for key, value in kept.items() if key not in NARROWING}

    def _combine(self, kept: dict[str, Any]) -> None:
        """Write ``oneOf`` as ``anyOf`` where that is the same, and a lone ``allOf`` as its part."""
        ways = kept.get("oneOf")
        if isinstance(ways, list) and "anyOf" not in kept:
            ways = _one_of_required(ways) or ways
            if self._exclude_each_other(ways):
                del kept["oneOf"]
                kept["anyOf"] = ways
        match kept:
            case {"allOf": [{"$ref": str(target), **others}]} if not others:
                if kept.keys() & SAYING == {"allOf"}:
                    del kept["allOf"]
                    kept["$ref"] = target

    def _depend(self, kept: dict[str, Any]) -> None:
        """Write what depends on a member as a choice: it is not there, or the rest holds, too."""
        choices = []
        for word in _DEPENDENT & kept.keys():
            if not isinstance(kept[word], Mapping):
                return
            for name, needed in kept[word].items():
                there = {"required": needed} if isinstance(needed, list) else needed
                there = {"allOf": [{"required": [name]}, there]}
                choices.append({"anyOf": [{"properties": {name: False}}, there]})
        if 0 < len(choices) <= MAX_DEPENDENT:
            kept["allOf"] = [*kept.get("allOf", []), *choices]
            for word in _DEPENDENT:
                kept.pop(word, None)

    def _name(self, kept: dict[str, Any]) -> None:
        """Write ``propertyNames`` as members, or as a pattern of members."""
        if "propertyNames" not in kept or "patternProperties" in kept:
            return
        names = self._pointed(kept["propertyNames"])
        if KEYWORDS["propertyNames"].says_nothing(names, kept):
            del kept["propertyNames"]
            return
        if not isinstance(names, Mapping) or "string" not in _listed(names.get("type", "string")):
            return
        others = kept.get("additionalProperties", True)
        said = {key: value for key, value in names.items() if key in SAYING - {"type"}}
        listed = [said["const"]] if said.keys() == {"const"} else said.get("enum")
        if isinstance(listed, list) and len(said) == 1:
            members = kept.get("properties", {})
            written = [name for name in listed if isinstance(name, str)]
            self._n_written += len(written) * len(json.dumps(others))
            if not isinstance(members, Mapping) or self._n_written > _MAX_WRITTEN:
                return
            kept["properties"] = {name: members.get(name, others) for name in written}
        elif self._is_strict and not kept.get("properties") and (pattern := _pattern(said)):
            kept["patternProperties"] = {pattern: others}
        else:
            return
        del kept["propertyNames"]
        kept["additionalProperties"] = False

    def _pointed(self, schema: Any) -> Any:
        """Follow references, as long as there is nothing beside them."""
        for _ in range(_MAX_DEPTH):
            if not isinstance(schema, Mapping) or schema.keys() & SAYING != {"$ref"}:
                break
            schema = pointed(schema["$ref"], self._root)
        return schema

    def _close(self, kept: dict[str, Any]) -> None:
        """Write ``unevaluated…`` as what it says here: of the others, which nothing has named."""
        if "unevaluatedItems" in kept and not kept.keys() & (_SOMETIMES | set(_ALWAYS)):
            others = "additionalItems" if isinstance(kept.get("items"), list) else "items"
            kept[others] = kept.pop("unevaluatedItems")
        if "unevaluatedProperties" not in kept:
            return
        named: dict[str, dict[str, Any]] = {"properties": {}, "patternProperties": {}}
        for part in self._parts(kept):
            if not isinstance(part, Mapping) or _SOMETIMES & part.keys():
                return
            if not all(isinstance(part.get(word, {}), Mapping) for word in named):
                return
            if part is not kept and {"additionalProperties", "unevaluatedProperties"} & part.keys():
                return
            for word, found in named.items():
                found |= dict.fromkeys(part.get(word, ()), True)
        for word, found in named.items():
            if found:
                kept[word] = found | kept.get(word, {})
        kept["additionalProperties"] = kept.pop("unevaluatedProperties")

    def _bound(self, kept: dict[str, Any]) -> None:
        """Bring bounds to numbers that llguidance can count to; both signs, as floats have them."""
        for word in ("minimum", "exclusiveMinimum"):
            if _is_number(kept.get(word)) and kept[word] < -MAX_BOUND:
                kept[word] = -MAX_BOUND
        if kept.get("type") != "integer":
            for word in ("maximum", "exclusiveMaximum"):
                if _is_number(kept.get(word)) and kept[word] > MAX_BOUND:
                    kept[word] = MAX_BOUND

    def _look(self, kept: dict[str, Any]) -> None:
        patterns = without_lookahead(kept["pattern"])
        if len(patterns) > 1:
            all_of = kept.get("allOf", [])
            kept["allOf"] = [*all_of, *({"pattern": one} for one in patterns[1:])]
        kept["pattern"] = patterns[0]

    # -- alternatives that exclude each other

    def _exclude_each_other(self, ways: Sequence[Any]) -> bool:
        parts = [list(self._parts(way)) for way in ways]
        return all(
            self._are_disjoint(one, other, 0)
            for i, one in enumerate(parts)
            for other in parts[i + 1 :]
        )

    def _parts(self, schema: Any, depth: int = 0) -> Iterator[Any]:
        """Give all schemas that a value of a schema follows: itself, and those it refers to."""
        yield schema
        self._n_left -= 1
        if not isinstance(schema, Mapping) or depth > _MAX_DEPTH or self._n_left < 0:
            return
        if isinstance(schema.get("$ref"), str):
            yield from self._parts(pointed(schema["$ref"], self._root), depth + 1)
        for part in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            yield from self._parts(part, depth + 1)

    def _are_disjoint(self, one: Sequence[Any], other: Sequence[Any], depth: int) -> bool:
        """Try to prove that no value can follow all these schemas and all those."""
        self._n_left -= 1
        if self._n_left < 0 or depth > _MAX_DEPTH:
            return False
        if any(part is False for part in (*one, *other)):
            return True
        mine, others = self._kinds(one, depth), self._kinds(other, depth)
        common = mine & others
        if not common:
            return True
        values, more = _values(one), _values(other)
        if values is not None and more is not None:
            return not any(value in more for value in values)
        return common == {"object"} and any(
            self._differ(name, one, other, depth) for name in {*_required(one), *_required(other)}
        )

    def _differ(self, name: str, one: Sequence[Any], other: Sequence[Any], depth: int) -> bool:
        """Try to prove that the schemas of a member exclude each other."""
        mine, others = (
            [each for part in parts if (said := _member(part, name)) is not None
             for each in self._parts(said)]
            for parts in (one, other)
        )  # fmt: skip
        return self._are_disjoint(mine, others, depth + 1)

    def _kinds(self, parts: Iterable[Any], depth: int) -> set[str]:
        """Give the types of the values that follow all of these schemas."""
        kinds = set(TYPES) - {"integer"}
        for part in parts:
            if not isinstance(part, Mapping):
                continue
            said = part.get("type")
            if isinstance(said, str | list):
                kinds &= {"number" if one == "integer" else one for one in _listed(said)}
            if (values := _values([part])) is not None:
                kinds &= {_kind(value) for value in values}
            for word in ("anyOf", "oneOf"):
                if isinstance(part.get(word), list) and depth < _MAX_DEPTH and self._n_left > 0:
                    self._n_left -= 1
                    ways = (list(self._parts(way)) for way in part[word])
                    kinds &= set().union(*(self._kinds(way, depth + 1) for way in ways))
        return kinds


def _is_silent(key: str, value: Any, schema: Mapping[str, Any]) -> bool:
    if key == "format" and isinstance(value, str) and value not in FORMATS:
        leave_out(f"format {value!r} of a JSON Schema", "it is an annotation")
        return True
    return key in KEYWORDS and KEYWORDS[key].says_nothing(value, schema)


def _one_of_required(ways: Sequence[Any]) -> list[Any]:
    """Write alternatives that only require members so that each excludes those of the others."""
    needed = [set(_required([way])) for way in ways]
    if not all(needed) or any(way.keys() & SAYING != {"required"} for way in ways):
        return []
    every = set().union(*needed)
    return [
        {
            "type": "object",
            "required": sorted(mine),
            "properties": dict.fromkeys(sorted(every - mine), False),
        }
        for i, mine in enumerate(needed)
        if not any(other <= mine for j, other in enumerate(needed) if i != j)
    ]


#: Formats of names that have a pattern; without a 29th of February.
_FORMATS = {
    "date": r"^\d{4}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])"
    r"|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|02-(?:0[1-9]|1\d|2[0-8]))$",
    "uuid": "^[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}$",
}


def _pattern(said: Mapping[str, Any]) -> str:
    """Write what names have to be as a pattern; empty if it cannot be."""
    if said.keys() == {"format"}:
        return _FORMATS.get(said["format"], "")
    if said.keys() == {"pattern"} and isinstance(said["pattern"], str):
        return said["pattern"]
    least, most = said.get("minLength", 0), said.get("maxLength", "")
    if said.keys() <= {"minLength", "maxLength"} and re.fullmatch(r"\d+ \d*", f"{least} {most}"):
        return rf"^[\s\S]{{{least},{most}}}$"
    return ""


def _listed(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _kind(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int() | float():
            return "number"
        case str():
            return "string"
    return "array" if isinstance(value, list) else "object"


def _values(parts: Iterable[Any]) -> Sequence[Any] | None:
    """Give the values that one of the schemas lists; None: none does."""
    for part in parts:
        if isinstance(part, Mapping) and "const" in part:
            return [part["const"]]
        if isinstance(part, Mapping) and isinstance(part.get("enum"), list):
            return list(part["enum"])
    return None


def _required(parts: Iterable[Any]) -> Iterator[str]:
    for part in parts:
        names = part.get("required") if isinstance(part, Mapping) else None
        yield from (
            name for name in (names if isinstance(names, list) else ()) if isinstance(name, str)
        )


def _member(part: Any, name: str) -> Any:
    """Find the schema of a member in that of an object; None: any value."""
    if not isinstance(part, Mapping):
        return None
    members = part.get("properties")
    if isinstance(members, Mapping) and name in members:
        return members[name]
    return None if part.get("patternProperties") else part.get("additionalProperties")


# -- patterns that look ahead at their beginning, as several that all have to match

#: A character, an escaped one, or a class.
_ONE = r"(?:\\[^bBdDsSwWpPukxc0-9]|\\[dDsSwW]|\[(?:\\.|[^\]\\])+\]|[^\\()\[\]{}.*+?^$|])"
_MAX_CHARS = 2**12
_AROUND = re.compile(r"\(\?<?[=!]")
_BARE = re.compile(r"\\.|\[(?:\\.|[^\]\\])*(?:\]|$)", re.DOTALL)


def without_lookahead(pattern: str) -> list[str]:
    """Take what a pattern looks ahead for apart from it: all of the patterns have to match.

    Gives the pattern alone if it looks ahead elsewhere, or in a way that cannot be written so.
    """
    if not pattern.startswith("^(?") or len(pattern) > _MAX_CHARS:
        return [pattern]
    rest, found = pattern[1:], []
    while rest.startswith(("(?=", "(?!")):
        if (end := _end_of_group(rest)) < 0:
            return [pattern]
        inner = rest[3 : end - 1]
        written = f"^(?:{inner})" if rest[2] == "=" else _without(inner)
        if not written:
            return [pattern]
        found.append(written)
        rest = rest[end:]
    if _alternates(rest) or rest.startswith(("*", "+", "?", "{")):
        return [pattern]
    if any(_AROUND.search(_BARE.sub("", one)) for one in (rest, *found)):
        return [pattern]
    return [f"^{rest}", *found]


def _without(inner: str) -> str:
    """Write a pattern of the texts that do not begin with another; empty if it cannot be."""
    found = re.fullmatch(rf"(\.\*)?({_ONE})(\2)?", inner)
    if found is None or (found[3] and not found[1]):
        return ""
    one = found[2]
    if not found[1]:
        return f"^(?:{_other(one)}|$)"
    # ``.*`` ends with the line: what comes behind it is free.
    others = _other(one, r"\n")
    body = f"(?:{one}?{others})*{one}?" if found[3] else f"{others}*"
    return rf"^{body}(?:\n[\s\S]*)?$"


def _other(one: str, *more: str) -> str:
    """Write the class of all other characters, but some more."""
    if one.startswith("[^"):
        return f"[{one[2:]}"
    return f"[^{one[1:-1] if one.startswith('[') else one}{''.join(more)}]"


def _alternates(pattern: str) -> bool:
    bare = _BARE.sub("x", pattern)
    while (shorter := re.sub(r"\([^()]*\)", "x", bare)) != bare:
        bare = shorter
    return "|" in bare


def _end_of_group(pattern: str) -> int:
    """Find the end of the group that a pattern begins with; negative if it has none."""
    depth, at = 0, 0
    while at < len(pattern):
        if (skipped := _BARE.match(pattern, at)) is not None:
            at = skipped.end()
            continue
        depth += {"(": 1, ")": -1}.get(pattern[at], 0)
        at += 1
        if not depth:
            return at
    return -1
