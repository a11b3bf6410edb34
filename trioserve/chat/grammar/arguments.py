"""Grammars of arguments, one for each step of a call that reads some."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeAlias, assert_never

import attrs

from trioserve.chat.formats.syntax import Elements, JsonArguments, Literals, Parameters
from trioserve.chat.grammar.kinds import ANY, TEXT, Shape
from trioserve.chat.grammar.schemas import (
    ANYTHING,
    Part,
    Rules,
    choice,
    object_of,
    quoted,
    sequence,
    texts,
)

#: The steps that read arguments.
ArgumentsStep: TypeAlias = JsonArguments | Parameters | Literals | Elements
_STEPS: Mapping[str, Callable[..., ArgumentsStep]] = {
    step.__name__: step for step in (JsonArguments, Parameters, Literals, Elements)
}

_BARE_KEY = re.compile(r"[A-Za-z0-9_.-]+")
#: The same in literals without escapes, which also have names such as ``$match``.
_PLAIN_KEY = re.compile(r"[\w.$@*+/-]+")
_ANY_KEY = "/[A-Za-z_][A-Za-z0-9_.\\-]{0,63}/"
_CDATA = "<![CDATA["
#: The types of all values but text.
_KINDS = ("number", "boolean", "null", "object", "array")
_MAX_KEY = 400
#: The depth of nested values that is followed, in notations other than JSON.
_MAX_DEPTH = 50
#: Keywords of numbers, which look the same in every notation.
_PLAIN = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
#: Keywords that limit a value.
_LIMITS = frozenset(
    {
        *_PLAIN,
        *("minLength", "maxLength", "pattern"),
        *("items", "prefixItems", "minItems", "maxItems"),
        *("properties", "required", "additionalProperties"),
    }
)


def dump_step(step: ArgumentsStep) -> dict[str, Any]:
    """Write a step as JSON."""
    return {"step": type(step).__name__, **attrs.asdict(step)}


def load_step(fields: Mapping[str, Any]) -> ArgumentsStep:
    """Read what `dump_step` has written."""
    values: dict[str, Any] = {
        key: tuple(one) if isinstance(one, list) else one
        for key, one in fields.items()
        if key != "step"
    }
    return _STEPS[fields["step"]](**values)


def write_arguments(rules: Rules, step: ArgumentsStep, part: Part, shape: Shape) -> str:
    """Write the arguments of a function; their reader knows the shape.

    Raises:
        InvalidRequestError: the schema cannot be enforced.
    """
    match step:
        case JsonArguments():
            return rules.schema(part.whole, part.param)
        case Parameters():
            return ParameterWriter(rules, step, shape).write(part)
        case Literals():
            return LiteralWriter(rules, step).write(part)
        case Elements():
            return write_elements(rules, step, part, shape)
    assert_never(step)


def write_any_arguments(rules: Rules, step: ArgumentsStep) -> str:
    """Write any arguments, for a function that is not known yet."""
    if isinstance(step, Elements):  # the end of an element has to be that of its beginning
        end = f"{step.mark}</{step.parent}>"
        return rules.text(ANYTHING, end)
    schema = {"type": "object"}
    return write_arguments(rules, step, Part(schema, schema, "tools"), Shape())


def write_members(
    rules: Rules, members: Iterable[tuple[str, bool]], others: str, comma: str
) -> str:
    """Write members in their order, with a comma between two; optional ones may be left out.

    Args:
        rules: where rules go.
        members: the rule of each member, and True if it must be there.
        others: the rule of any other member; may be empty.
        comma: the text between two.
    """
    after = rules.rule(f"({comma} {others})*") if others else ""
    first = f"({others} {after})?" if others else '""'
    for member, needed in reversed(list(members)):
        begun = sequence(member, after)
        first = begun if needed else f"{begun} | {rules.rule(first)}"
        after = rules.rule(sequence(f"({comma} {member}){'' if needed else '?'}", after))
    return rules.rule(first)


def _text_body(part: Part, end: str, kinds: frozenset[str] = TEXT) -> str:
    """Write the texts that a schema allows, as one regular expression; empty without any."""
    bodies = list(texts(part, end, kinds))
    return choice(f"({body})" for body in bodies) if bodies else ""


def _any_key(members: Iterable[str]) -> str:
    """Write the keys that are not declared."""
    declared = [re.escape(key) for key in members if _BARE_KEY.fullmatch(key)]
    return f"{_ANY_KEY} & ~/({'|'.join(declared)})/" if declared else _ANY_KEY


def _declared(part: Part) -> list[str]:
    return [key for key, _, _ in object_of(part).members]


# -- between markers


class ParameterWriter:
    """Writes parameters that stand one by one between markers."""

    def __init__(self, rules: Rules, syntax: Parameters, shape: Shape) -> None:
        self._rules = rules
        self._syntax = syntax
        self._shape = shape

    def write(self, part: Part) -> str:
        rules, content = self._rules, object_of(part)
        members = []
        for key, value, needed in content.members:
            self._check_key(key, value)
            head = rules.marker(f"{self._syntax.open}{key}{self._syntax.key_end}")
            body = self._value(value, self._shape.member(key).kinds)
            members.append((rules.rule(sequence(head, body)), needed))
        others = ""
        if content.others is not None:
            key = rules.terminal(_any_key(_declared(part)))
            open_, end = rules.marker(self._syntax.open), rules.marker(self._syntax.key_end)
            others = rules.rule(sequence(open_, key, end, self._value(content.others, ANY)))
        return write_members(rules, members, others, rules.space)

    def _check_key(self, key: str, part: Part) -> None:
        marks = (self._syntax.key_end, self._syntax.value_open or self._syntax.key_end)
        if not key or len(key) > _MAX_KEY or any(mark in key for mark in marks):
            raise part.refuse("this model cannot write such a name")

    def _value(self, part: Part, kinds: frozenset[str]) -> str:
        """Write a value and its end. Its reader looks for values of some kinds."""
        syntax, rules = self._syntax, self._rules
        newline = "\n" if syntax.newlines else ""
        typed = bool(syntax.text_attribute)
        if syntax.is_json:
            value = rules.schema(part.whole, part.param)
            start, end = self._open("") + newline, f"{newline}{syntax.close}"
            return sequence(self._marker(start), value, rules.marker(end))
        kinds = ANY if typed else kinds
        end = f"{newline}{syntax.close}"
        ways = []
        if "string" in part.kinds & kinds:
            body = _text_body(part, end, TEXT if typed else kinds)
            open_ = self._open(syntax.text_attribute) + newline
            if body and syntax.cdata:
                plain = rf"{body} & ~/<!\[CDATA\[(?s:.*)/"
                ways.append(sequence(self._marker(open_), rules.text(plain, end)))
                body = _text_body(part, f"]]>{end}")
                open_ += _CDATA
                end = f"]]>{end}"
            if body:
                ways.append(sequence(self._marker(open_), rules.text(body, end)))
        if part.kinds & kinds - TEXT:
            attributes = _attributes(syntax.text_attribute, part) if typed else [""]
            opens = choice(self._marker(self._open(one) + newline) for one in attributes)
            value = rules.schema(part.without_strings(kinds), part.param)
            close = rules.marker(f"{newline}{syntax.close}")
            ways.append(sequence(opens, value, close))
        if not ways:
            raise part.refuse("it has no value that this model can write")
        return choice(ways)

    def _open(self, attribute: str) -> str:
        value_open = self._syntax.value_open
        if attribute:
            return f" {attribute}{value_open}"
        return f"\n{value_open}" if value_open else ""

    def _marker(self, text: str) -> str:
        """Write the text before a value; a newline in front of a marker may be missing."""
        if text.startswith("\n") and self._syntax.value_open:
            return sequence(self._rules.space, self._rules.marker(text[1:]))
        return self._rules.marker(text) if text else ""


def _attributes(text_attribute: str, part: Part) -> list[str]:
    """Write the attributes of what is not text, by that of text: ``string="true"``, or a type."""
    name, _, value = text_attribute.partition("=")
    if value == '"true"':
        return [f'{name}="false"']
    schema = part.resolved
    kinds = schema.get("type") if isinstance(schema, Mapping) else None
    kinds = [kinds] if isinstance(kinds, str) else kinds or _KINDS
    named = ("number" if kind == "integer" else kind for kind in kinds)
    return [f'{name}="{kind}"' for kind in dict.fromkeys(named) if kind in _KINDS]


# -- elements of XML


def write_elements(rules: Rules, syntax: Elements, part: Part, shape: Shape) -> str:
    """Write all the arguments of a function, and the end of the element around them.

    Text is written as it is, and anything else as JSON. Undeclared members are not allowed: a rule
    cannot repeat the name of an element at its end.
    """
    content = object_of(part)
    if content.others is not None and not content.members:
        raise part.refuse("with this model, arguments must be in 'properties'")
    members = [
        (_element(rules, syntax.mark, key, value, shape.member(key)), needed)
        for key, value, needed in content.members
    ]
    end = rules.marker(f"{syntax.mark}</{syntax.parent}>")
    return sequence(write_members(rules, members, "", rules.space), rules.space, end)


def _element(rules: Rules, mark: str, key: str, part: Part, shape: Shape) -> str:
    if not key or len(key) > _MAX_KEY or ">" in key or key.startswith("/"):
        raise part.refuse("this model cannot write such a name")
    end = f"{mark}</{key}>"
    ways = []
    if "string" in part.kinds & shape.kinds:
        body = _text_body(part, end, shape.kinds)
        if body and shape.nests:  # or it might begin with another element
            body = rf"{body} & ~/(?s:.*)\{mark[0]}(?s:.*)/"
        if body:
            ways.append(rules.text(body, end))
    if part.kinds & shape.kinds - TEXT:
        value = rules.schema(part.without_strings(shape.kinds), part.param)
        ways.append(sequence(value, rules.marker(end)))
    if not ways:
        raise part.refuse("it has no value that this model can write")
    return rules.rule(sequence(rules.marker(f"{mark}<{key}>"), choice(ways)))


# -- literals


class LiteralWriter:
    """Writes arguments as literals. With escapes, JSON is a way to write them."""

    def __init__(self, rules: Rules, syntax: Literals) -> None:
        self._rules = rules
        self._syntax = syntax
        self._known: dict[int, str] = {}  # rules of values, by the identity of their schemas

    def write(self, part: Part) -> str:
        syntax = self._syntax
        return self._object(part, (syntax.open, syntax.equals, syntax.close), 0)

    def _object(self, part: Part, marks: tuple[str, str, str], depth: int) -> str:
        rules, content = self._rules, object_of(part)
        open_, equals, close = marks
        members = []
        for key, value, needed in content.members:
            head = sequence(self._key(key, value), quoted(equals))
            members.append((rules.rule(sequence(head, self._value(value, depth + 1))), needed))
        others = ""
        if content.others is not None:
            other = self._value(content.others, depth + 1)
            key = rules.terminal(_any_key(_declared(part)))
            others = rules.rule(sequence(key, quoted(equals), other))
        comma = rules.rule(r"/,[ ]?/")
        inside = write_members(rules, members, others, comma)
        return sequence(quoted(open_), inside, quoted(close))

    def _key(self, key: str, part: Part) -> str:
        bare = _BARE_KEY if self._syntax.escapes else _PLAIN_KEY
        if bare.fullmatch(key) and len(key) <= _MAX_KEY:
            return quoted(key)
        if self._syntax.escapes:
            return quoted(json.dumps(key, ensure_ascii=False))
        quote = self._syntax.quotes[0]
        if quote in key:
            raise part.refuse("this model cannot write such a name")
        mark = self._rules.marker(quote)
        return sequence(mark, quoted(key) if key else "", mark)

    def _value(self, part: Part, depth: int) -> str:
        if self._syntax.escapes:
            schema = part.resolved
            value = self._rules.schema(part.whole, part.param)
            is_boolean = isinstance(schema, Mapping) and schema.get("type") == "boolean"
            if is_boolean and not {"const", "enum"} & schema.keys():
                return choice((value, '"True"', '"False"'))
            return value
        if depth > _MAX_DEPTH:
            raise part.refuse("it is nested too deeply")
        schema = part.resolved
        if id(schema) in self._known:
            return self._known[id(schema)]
        name = self._rules.later()
        self._known[id(schema)] = name  # before its parts, which may refer to it
        self._rules.define(name, choice(self._ways(schema, part, depth)))
        return name

    def _ways(self, schema: Any, part: Part, depth: int) -> list[str]:
        """Return the notations of a value, in formats with special quotes for strings."""
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            raise part.refuse("a schema is an object, and not false")
        if "allOf" in schema or "$ref" in schema:
            word = "allOf" if "allOf" in schema else "$ref"
            raise part.refuse(f"with this model, '{word}' is not supported here")
        if "const" in schema or "enum" in schema:
            values = [schema["const"]] if "const" in schema else schema["enum"]
            return [self._literal(value, part) for value in values]
        for word in ("anyOf", "oneOf"):
            if isinstance(schema.get(word), list):
                if beside := _LIMITS & schema.keys():
                    raise part.refuse(
                        f"with this model, '{word}' cannot have {min(beside)!r} beside it"
                    )
                parts = enumerate(schema[word])
                return [self._value(part.at(one, word, str(i)), depth + 1) for i, one in parts]
        kinds = schema.get("type") or ["string", "number", "boolean", "null", "object", "array"]
        kinds = kinds if isinstance(kinds, list) else [kinds]
        return [self._of_kind(kind, schema, part, depth) for kind in kinds]

    def _of_kind(self, kind: object, schema: Mapping[str, Any], part: Part, depth: int) -> str:
        if kind == "string":
            return self._string(_text_body(part, self._syntax.quotes[0]))
        if kind == "object":
            inner = Part({**schema, "type": "object"}, part.root, part.param)
            return self._object(inner, ("{", ":", "}"), depth)
        if kind == "array":
            return self._array(schema, part, depth)
        if kind not in ("integer", "number", "boolean", "null"):
            raise part.refuse(f"there is no type {kind!r:.40}")
        limits = {word: schema[word] for word in _PLAIN if word in schema}
        return self._rules.schema({"type": kind, **limits}, part.param)

    def _array(self, schema: Mapping[str, Any], part: Part, depth: int) -> str:
        n_min, n_max = schema.get("minItems", 0), schema.get("maxItems")
        odd = {"prefixItems", "contains", "uniqueItems"} & schema.keys()
        if odd:
            raise part.refuse(f"with this model, '{min(odd)}' is not supported")
        if type(n_min) is not int or not (n_max is None or type(n_max) is int):
            raise part.refuse("'minItems' and 'maxItems' must be integers")
        if n_max is not None and n_max < max(1, n_min):
            if n_max < n_min:
                raise part.refuse("'maxItems' is less than 'minItems'")
            return '"[]"'
        item = self._value(part.at(schema.get("items", True), "items"), depth + 1)
        comma = self._rules.rule(r"/,[ ]?/")
        more = "" if n_max is None else n_max - 1
        items = item if more == 0 else f"{item} ({comma} {item}){{{max(0, n_min - 1)},{more}}}"
        return f'"[" {items} "]"' if n_min else f'"[" ({items})? "]"'

    def _string(self, body: str) -> str:
        quote = self._syntax.quotes[0]
        return sequence(self._rules.marker(quote), self._rules.text(body, quote))

    def _literal(self, value: Any, part: Part) -> str:
        """Write one value."""
        if isinstance(value, str):
            if self._syntax.quotes[0] in value:
                raise part.refuse("this model cannot write such a text")
            mark = self._rules.marker(self._syntax.quotes[0])
            return sequence(mark, quoted(value) if value else "", mark)
        if isinstance(value, list):
            items = [self._literal(one, part) for one in value]
            return sequence('"["', *_joined(items), '"]"')
        if isinstance(value, Mapping):
            items = [
                sequence(self._key(key, part), '":"', self._literal(one, part))
                for key, one in value.items()
            ]
            return sequence('"{"', *_joined(items), '"}"')
        return quoted(json.dumps(value))


def _joined(items: list[str]) -> list[str]:
    return [part for item in items for part in ('","', item)][1:]
