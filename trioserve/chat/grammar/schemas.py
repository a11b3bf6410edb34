"""The schemas of arguments, as the grammars of tool calls need them, and the text of a grammar.

Where a model writes arguments as JSON, llguidance enforces their schema. Where it writes text
between markers, the schema is taken apart here: what is text, and which text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

import attrs

from trioserve.chat.grammar.kinds import ANY, TEXT, kinds_of, read_bare, resolve, types_of
from trioserve.chat.grammar.regular import CLASS, as_pattern, parse_expression
from trioserve.errors import InvalidRequestError

#: Places in the rule of a call, for the name of the function and for its arguments.
NAME, ARGUMENTS = "\0name", "\0arguments"
#: Any text.
ANYTHING = "/(?s:.*)/"
#: Whitespace where the parsers skip it, as in JSON; a weak model comes to its end.
SPACE = r"/([ ]|\n{1,2}[ \t]{0,20})?/"


class Rules:
    """A grammar in the making. The methods give names of rules, or parts of Lark.

    A `suffix` ends all names, so that two grammars can be joined.
    """

    def __init__(self, suffix: str = "") -> None:
        self._suffix = suffix
        self._calls: dict[str, str] = {}
        self._lines: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._named: dict[str, str] = {}
        self._markers: dict[str, str] = {}
        self._texts: dict[tuple[str, str], str] = {}
        self._schemas: dict[str, str] = {}

    def rule(self, body: str) -> str:
        """Add a rule, unless there is the same one."""
        if body not in self._lines:
            self._lines[body] = self._name("r", self._lines)
        return self._lines[body]

    def terminal(self, body: str) -> str:
        """Add a regular expression, unless there is the same one."""
        if body not in self._terminals:
            self._terminals[body] = self._name("W", self._terminals)
        return self._terminals[body]

    def later(self) -> str:
        """Name a rule that others can refer to before it is there."""
        name = self._name("v", self._named)
        self._named[name] = ""
        return name

    def define(self, name: str, body: str) -> None:
        """Add the rule that `later` gave a name."""
        self._named[name] = body

    def calls(self, body: str) -> str:
        """Add a rule for a call of any function: `body` has places for `NAME` and `ARGUMENTS`."""
        return self._calls.setdefault(body, self._name("c", self._calls))

    def _name(self, letter: str, known: Sized) -> str:
        return f"{letter}{len(known)}{self._suffix}"

    @property
    def space(self) -> str:
        return self.rule(SPACE)

    def marker(self, text: str) -> str:
        """Add a text that the model may write as control tokens."""
        return self._markers.setdefault(text, self._name("m", self._markers))

    def text(self, body: str, end: str) -> str:
        """Add text that goes up to a marker, and the marker."""
        return self._texts.setdefault((body, end), self._name("t", self._texts))

    def schema(self, schema: Any, param: str) -> str:
        """Add JSON that a schema describes. Errors of the schema name `param`."""
        entry = json.dumps({"schema": schema, "param": param}, ensure_ascii=False)
        return self._schemas.setdefault(entry, self._name("s", self._schemas))

    def parts(self, start: str) -> dict[str, Any]:
        """Give all of it: what matches `start`, in Lark, and what the compiler writes."""
        lines = [f"start: {start}"] if start else []
        for bodies in (self._lines, self._terminals):
            lines += [f"{name}: {body}" for body, name in bodies.items()]
        lines += [f"{name}: {body}" for name, body in self._named.items()]
        return {
            "rules": "\n".join(lines),
            "markers": {name: text for text, name in self._markers.items()},
            "texts": {name: {"body": b, "end": e} for (b, e), name in self._texts.items()},
            "schemas": {name: json.loads(entry) for entry, name in self._schemas.items()},
            "calls": {name: body for body, name in self._calls.items()},
        }


def quoted(text: str) -> str:
    """Write a literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def choice(parts: Iterable[str]) -> str:
    """Write alternatives, each once."""
    each = list(dict.fromkeys(parts))
    return each[0] if len(each) == 1 else f"({' | '.join(each)})"


def sequence(*parts: str) -> str:
    """Write a sequence of parts; empty ones are left out."""
    return " ".join(part for part in parts if part)


#: Bare texts that a reader may take for a value of each kind.
_LOOKS = {
    "number": r"-?[0-9]+(\.[0-9]+)?([eE][+\-]?[0-9]+)?",
    "boolean": r"[tT]rue|[fF]alse",
    "null": r"null|None",
    "object": r"\{(?s:.*)",
    "array": r"\[(?s:.*)",
}
MAX_LENGTH = 2**16
_MAX_PATTERN = 2**12
_MAX_ALTERNATIVES = 200
MAX_DEPTH = 100  # values in values

_TEXT_KEYWORDS = frozenset({"minLength", "maxLength", "pattern"})
_COMBINING = frozenset({"allOf", "anyOf", "oneOf", "$ref"})


@attrs.frozen
class Part:
    """A part of the schema of a tool's arguments.

    `root` is the target of references; `param` names the part in the request.
    """

    schema: Any
    root: Any
    param: str

    @property
    def resolved(self) -> Any:
        return resolve(self.schema, self.root)

    @property
    def kinds(self) -> frozenset[str]:
        return kinds_of(self.schema, self.root)

    @property
    def whole(self) -> Any:
        """The schema by itself, with its definitions."""
        if self.schema is self.root or not _refers(self.schema):
            return self.schema
        own, root = (moved(one, "#/$defs/root") for one in (self.schema, self.root))
        return {"$ref": "#/$defs/_", "$defs": {"_": own, "root": root}}

    def without_strings(self, known: frozenset[str] = ANY) -> Any:
        """Give the schema of those values that are no strings, but of a kind that is `known`."""
        kinds = self.kinds
        if "string" not in kinds and kinds <= known:
            return self.whole
        others = {"type": types_of(kinds & known - TEXT)}
        if self.schema is True or self.schema == {}:
            return others
        if kinds <= known and (rest := _without_strings(self.resolved)) is not None:
            return attrs.evolve(self, schema=rest).whole
        whole = dict(self.whole)
        definitions = {"$defs": whole.pop("$defs")} if "$defs" in whole else {}
        return {"allOf": [whole, others], **definitions}

    def at(self, schema: Any, *steps: str) -> Part:
        return Part(schema, self.root, ".".join((self.param, *steps)))

    def refuse(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError.at(self.param, f"cannot be used: {problem}.")


def _without_strings(schema: Mapping[str, Any]) -> Any:
    """Leave out strings where the schema names them; None: it does not."""
    kinds = schema.get("type")
    if isinstance(kinds, list):
        return {**schema, "type": [kind for kind in kinds if kind != "string"]}
    if isinstance(schema.get("enum"), list):
        return {**schema, "enum": [one for one in schema["enum"] if not isinstance(one, str)]}
    for word in ("anyOf", "oneOf"):
        parts = schema.get(word)
        if isinstance(parts, list) and all(isinstance(part, Mapping) for part in parts):
            rest = [part for part in parts if part.get("type") != "string"]
            if all(isinstance(part.get("type"), str) for part in rest):
                return {**schema, word: rest}
    return None


@attrs.frozen
class Object:
    """The members of an object: each with whether it must be there, and others, or None."""

    members: tuple[tuple[str, Part, bool], ...]
    others: Part | None


def is_too_deep(schema: Any) -> bool:
    """True if a schema is nested so deeply that recursion might not follow it."""
    level = [schema] if isinstance(schema, Mapping | list) else []
    for _ in range(MAX_DEPTH):
        inner = (one.values() if isinstance(one, Mapping) else one for one in level)
        level = [one for values in inner for one in values if isinstance(one, Mapping | list)]
        if not level:
            return False
    return True


#: Keywords whose values are schemas by name, where names are not keywords.
NAMED = ("properties", "patternProperties", "$defs", "definitions")
#: The same, with keywords that other ones take the place of.
_BY_NAME = frozenset({*NAMED, "dependencies", "dependentRequired", "dependentSchemas"})
#: Keywords with values in place of schemas.
_VALUES = frozenset({"const", "default", "enum", "examples"})


def closed(part: Part) -> Part:
    """Allow no arguments but those that are declared, where the schema leaves that open."""
    schema = part.schema
    if (
        isinstance(schema, Mapping)
        and schema.get("properties") is not None
        and "additionalProperties" not in schema
        and "patternProperties" not in schema
        and not _COMBINING & schema.keys()
    ):
        schema = {**schema, "additionalProperties": False}
    return attrs.evolve(part, schema=schema, root=schema)


def check_is_object(part: Part) -> Part:
    """Check that arguments are an object, and set that type in the schema.

    Raises:
        InvalidRequestError: they are something else.
    """
    schema = part.resolved
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    if kind is not None and kind != "object" and not (isinstance(kind, list) and "object" in kind):
        raise part.refuse("arguments are an object")
    if kind == "object" or not isinstance(part.schema, Mapping):
        return part
    schema = {**part.schema, "type": "object"}
    return attrs.evolve(part, schema=schema, root=schema)


def object_of(part: Part) -> Object:
    """Take the schema of an object apart.

    Raises:
        InvalidRequestError: it combines schemas, or has limits that cannot be enforced here.
    """
    schema = part.resolved
    if schema is True:
        schema = {}
    if not isinstance(schema, Mapping):
        raise part.refuse("a schema is an object")
    odd = (_COMBINING | {"patternProperties", "minProperties", "maxProperties"}) & schema.keys()
    if odd:
        raise part.refuse(f"with this model, '{min(odd)}' is not supported for an object")
    properties = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        raise part.refuse("'properties' is an object and 'required' a list")
    for name in required:
        if name not in properties:
            raise part.refuse(f"with this model, {name!r} must be in 'properties' to be required")
    more = schema.get("additionalProperties", not properties)
    return Object(
        tuple(
            (key, part.at(value, "properties", key), key in required)
            for key, value in properties.items()
        ),
        None if more is False else part.at(more, "additionalProperties"),
    )


def texts(part: Part, end: str, kinds: frozenset[str]) -> Iterator[str]:
    """Give the regular expressions, in Lark, of the strings that a schema allows.

    Args:
        part: the schema.
        end: the text after a string, which it cannot contain.
        kinds: of values that its reader looks for: a string can look like a string only.

    Raises:
        InvalidRequestError: it cannot be enforced.
    """
    return _texts(part, end, kinds, set())


def _texts(part: Part, end: str, kinds: frozenset[str], seen: set[int]) -> Iterator[str]:
    """Give each alternative once: references may lead back, or to one in many ways."""
    schema = part.resolved
    if id(schema) in seen:
        return
    seen.add(id(schema))
    if len(seen) > _MAX_ALTERNATIVES:
        raise part.refuse(f"with this model, it has more than {_MAX_ALTERNATIVES} alternatives")
    schema = {} if schema is True else schema
    if not isinstance(schema, Mapping):
        raise part.refuse("a schema is an object, and not false")
    if "const" in schema or "enum" in schema:
        for value in [schema["const"]] if "const" in schema else schema["enum"]:
            if not isinstance(value, str) or end.strip() in value:
                continue
            if read_bare(value, kinds | TEXT).startswith('"'):
                yield quoted(value) if value else '""'
        return
    if "allOf" in schema or "$ref" in schema:
        word = "allOf" if "allOf" in schema else "$ref"
        raise part.refuse(f"with this model, '{word}' is not supported here")
    for word in ("anyOf", "oneOf"):
        if isinstance(schema.get(word), list):
            if _TEXT_KEYWORDS & schema.keys():
                raise part.refuse(f"with this model, '{word}' cannot have limits beside it")
            for i, one in enumerate(schema[word]):
                yield from _texts(part.at(one, word, str(i)), end, kinds, seen)
            return
    named = schema.get("type", "string")
    if named == "string" or (isinstance(named, list) and "string" in named):
        yield from _bodies(schema, part, end, kinds)


def _bodies(
    schema: Mapping[str, Any], part: Part, end: str, kinds: frozenset[str]
) -> Iterator[str]:
    shortest, longest = schema.get("minLength", 0), schema.get("maxLength")
    for name, length in (("minLength", shortest), ("maxLength", longest)):
        if length is not None and not (type(length) is int and 0 <= length <= MAX_LENGTH):
            raise part.refuse(f"'{name}' must be an integer between 0 and {MAX_LENGTH}")
    conditions = [ANYTHING]
    if shortest or longest is not None:
        conditions = [f"/(?s:.{{{shortest},{'' if longest is None else longest}}})/"]
    if "pattern" in schema:
        conditions.append(_pattern(schema["pattern"], part))
    kinds |= {"number"} if "integer" in kinds else set()
    if looks := "|".join(looks for kind, looks in _LOOKS.items() if kind in kinds):
        # A text may not continue where such a value ends: llguidance would not try both.
        conditions.append(rf"~/\s*({looks})\s*({as_pattern(end[0])}(?s:.*))?/")
    yield " & ".join(conditions)


def check_pattern(pattern: object) -> str:
    """Describe why a pattern cannot be enforced, such as anchors inside it; empty if it can be."""
    try:
        if not isinstance(pattern, str) or len(pattern) > _MAX_PATTERN:
            return f"'pattern' must be text of at most {_MAX_PATTERN} characters"
        parse_expression(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"'pattern' is not a regular expression: {error}"
    inner, at_start, at_end = _without_anchors(pattern)
    bare = re.sub(rf"\\[^bB1-9]|{CLASS}", "", inner, flags=re.DOTALL)
    if re.search(r"\(\?(?:[=!<(]|P[=<])|\\[1-9]", bare):
        return "with this model, 'pattern' may not look around or back"
    if re.search(r"[$^]|\\[bB]", bare) or ((at_start or at_end) and "|" in _outside(bare)):
        return "with this model, 'pattern' may have anchors at its ends only"
    return ""


def _without_anchors(pattern: str) -> tuple[str, bool, bool]:
    """Take a pattern apart: what is between its anchors, and whether it has them."""
    at_start = pattern.startswith("^")
    at_end = bool(re.search(r"(?<!\\)(?:\\\\)*\$$", pattern))
    return pattern[at_start : len(pattern) - at_end], at_start, at_end


def _pattern(pattern: Any, part: Part) -> str:
    """Translate a pattern that may match anywhere into one that matches a whole text."""
    if problem := check_pattern(pattern):
        raise part.refuse(problem)
    inner, at_start, at_end = _without_anchors(pattern)
    body = re.sub(r"(?<!\\)((?:\\\\)*)/", r"\1\\/", inner).replace("\n", r"\n")
    free = "(?s:.*)"
    return f"/{'' if at_start else free}({body}){'' if at_end else free}/"


def _outside(pattern: str) -> str:
    """Leave out what stands in parentheses."""
    while (shorter := re.sub(r"\([^()]*\)", "", pattern)) != pattern:
        pattern = shorter
    return pattern


def _refers(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "$ref" in value or any(_refers(one) for one in value.values())
    return isinstance(value, list) and any(_refers(one) for one in value)


def rewritten(schema: Any, change: Callable[[dict[str, Any], Mapping[str, Any]], Any]) -> Any:
    """Write a schema again.

    `change` gets each schema in it, the inner ones first: with its parts rewritten, and as it was.
    """
    if isinstance(schema, list):
        return [rewritten(part, change) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    parts = {}
    for key, value in schema.items():
        if key in _BY_NAME and isinstance(value, Mapping):
            value = {name: rewritten(part, change) for name, part in value.items()}
        elif key not in _VALUES:
            value = rewritten(value, change)
        parts[key] = value
    return change(parts, schema)


def moved(schema: Any, to: str) -> Any:
    """Copy a schema so that its references, which lead into itself, lead into ``to``."""

    def move(parts: dict[str, Any], _: Mapping[str, Any]) -> dict[str, Any]:
        reference = parts.get("$ref")
        if isinstance(reference, str) and reference.startswith("#"):
            parts["$ref"] = f"{to}{reference[1:]}"
        return {key: value for key, value in parts.items() if key not in ("$schema", "$id")}

    return rewritten(schema, move)
