"""Structural tags: free text in which some parts, such as calls, must follow formats.

The notation is XGrammar's, which vLLM takes, also in its older form with `structures`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from trioserve.chat.grammar.regular import as_pattern
from trioserve.chat.grammar.schemas import (
    ANYTHING,
    Rules,
    choice,
    quoted,
    sequence,
)
from trioserve.errors import InvalidRequestError, UnsupportedFieldError
from trioserve.types import Grammar

_MAX_DEPTH = 32  # formats in formats
_MAX_FORMATS = 1000


def structural_grammar(given: Any, path: str) -> Grammar:
    """Make the grammar of a structural tag, which is an object or JSON.

    Raises:
        InvalidRequestError: it is malformed, or has a format that cannot be enforced; `param` names
            the place.
    """
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise InvalidRequestError.at(path, "is not JSON.") from None
    tag = _object(given, path)
    writer = _Writer()
    if "structures" in tag:
        start = writer.format(_of_structures(tag, path), path)
    else:
        start = writer.format(_get(tag, "format", path), f"{path}.format")
    source = json.dumps(writer.rules.parts(start), ensure_ascii=False)
    return Grammar("structural", source, param=path)


def _of_structures(tag: Mapping[str, Any], path: str) -> dict[str, Any]:
    """Write the older form as the newer one."""
    structures = _list(tag, "structures", path)
    objects = [_object(one, f"{path}.structures[{i}]") for i, one in enumerate(structures)]
    tags = [
        {**one, "content": {"type": "json_schema", "json_schema": one.get("schema")}}
        for one in objects
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Writer:
    """Writes formats as rules of a grammar."""

    def __init__(self) -> None:
        self.rules = Rules()
        self._depth = self._n_formats = 0

    def format(self, given: Any, path: str, end: str = "") -> str:
        """Write a format, and the text that ends it, if there is one."""
        fields = _object(given, path)
        kind = _text(fields, "type", path)
        self._n_formats += 1
        if self._n_formats > _MAX_FORMATS:
            raise InvalidRequestError.at(path, f"is one of more than {_MAX_FORMATS} formats.")
        if self._depth == _MAX_DEPTH:
            raise InvalidRequestError.at(path, f"is nested more than {_MAX_DEPTH} deep.")
        self._depth += 1
        body = self.rules.rule(self._written(kind, fields, path, end))
        self._depth -= 1
        return body

    def _written(self, kind: str, fields: Mapping[str, Any], path: str, end: str) -> str:
        ended = self.rules.marker(end) if end else ""
        match kind:
            case "any_text":
                free = _free(_texts(fields, "excludes", path))
                return self.rules.text(free, end) if end else self.rules.terminal(free)
            case "regex":
                return self._expression(_text(fields, "pattern", path), end)
            case "const_string":
                return sequence(self._constant(_text(fields, "value", path)), ended)
            case "json_schema":
                return sequence(self._schema(fields, path), ended)
            case "sequence":
                return sequence(*self._sequence(_list(fields, "elements", path), path), ended)
            case "or":
                elements = enumerate(_list(fields, "elements", path))
                each = [self.format(one, f"{path}.elements[{i}]") for i, one in elements]
                return sequence(choice(each), ended)
            case "tag":
                begin = _text(fields, "begin", path)
                return sequence(self._constant(begin), self._content(fields, path), ended)
            case "triggered_tags":
                return sequence(self._triggered(fields, path), ended)
            case "tags_with_separator":
                return sequence(self._separated(fields, path), ended)
        raise UnsupportedFieldError.at(f"{path}.type", f"is {kind!r:.80}, which is not supported.")

    def _constant(self, text: str) -> str:
        return self.rules.marker(text) if text else '""'

    def _expression(self, pattern: str, end: str) -> str:
        """Write an expression, and the text after it: in one lexeme, or with control tokens."""
        if not end:
            return self.rules.terminal(_slashed(pattern))
        ended = self.rules.terminal(_slashed(f"(?:{pattern}){as_pattern(end)}"))
        alone = sequence(self.rules.terminal(_slashed(pattern)), self.rules.marker(end))
        return choice([ended, alone])

    def _schema(self, fields: Mapping[str, Any], path: str) -> str:
        if (style := fields.get("style", "json")) != "json":
            raise UnsupportedFieldError.at(f"{path}.style", f'is {style!r:.80}, and not "json".')
        schema = fields.get("json_schema")
        if not isinstance(schema, dict | bool):
            raise InvalidRequestError.at(f"{path}.json_schema", "must be a JSON Schema.")
        return self.rules.schema(schema, f"{path}.json_schema")

    def _content(self, tag: Mapping[str, Any], path: str) -> str:
        """Write the content of a tag, and one of the texts that end it."""
        given = tag.get("end")
        ends = [given] if isinstance(given, str) else _texts(tag, "end", path)
        if not ends:
            raise InvalidRequestError.at(f"{path}.end", "must be text, or a list of texts.")
        content = _object(_get(tag, "content", path), f"{path}.content")
        each = []
        for end in ends:
            others = [other for other in ends if other != end and other]
            if content.get("type") == "any_text":
                others += _texts(content, "excludes", f"{path}.content")
                content = {**content, "excludes": others}
            each.append(self.format(content, f"{path}.content", end))
        return choice(each)

    def _sequence(self, elements: Sequence[Any], path: str) -> Iterator[str]:
        """Write elements one after another. Free text ends where a constant begins."""
        i = 0
        while i < len(elements):
            place, element = f"{path}.elements[{i}]", _object(elements[i], f"{path}.elements[{i}]")
            i += 1
            end = ""
            if element.get("type") in ("any_text", "regex") and i < len(elements):
                following = _object(elements[i], f"{path}.elements[{i}]")
                if following.get("type") == "const_string":
                    end = _text(following, "value", f"{path}.elements[{i}]")
                    i += 1
                elif element["type"] == "any_text":
                    raise UnsupportedFieldError.at(
                        f"{path}.elements[{i}]", "must be a const_string, where any_text ends."
                    )
            yield self.format(element, place, end)

    # -- tags

    def _triggered(self, fields: Mapping[str, Any], path: str) -> str:
        """Write free text in which a trigger begins a tag."""
        triggers = _texts(fields, "triggers", path)
        if not triggers:
            raise InvalidRequestError.at(f"{path}.triggers", "must not be empty.")
        for one in triggers:
            if any(one in other for other in triggers if other != one) or not one:
                raise InvalidRequestError.at(f"{path}.triggers", f"has {one!r:.80} in another one.")
        rest: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for i, given in enumerate(_list(fields, "tags", path)):
            place = f"{path}.tags[{i}]"
            tag = _object(given, place)
            begin = _text(tag, "begin", place)
            trigger = next((one for one in triggers if begin.startswith(one)), None)
            if trigger is None:
                raise InvalidRequestError.at(f"{place}.begin", "must begin with a trigger.")
            after = begin.removeprefix(trigger)
            head = self.rules.marker(after) if after else ""
            rest[trigger].append(self.rules.rule(sequence(head, self._content(tag, place))))
        excluded = _texts(fields, "excludes", path)
        tags = []
        for trigger, ways in rest.items():
            others = [one for one in triggers if one != trigger]
            text = self.rules.text(_free([*others, *excluded]), trigger)
            if ways:
                tags.append(self.rules.rule(sequence(text, choice(ways))))
        tail = self.rules.terminal(_free([*triggers, *excluded]))
        return _repeated(choice(tags) if tags else "", tail, fields, path)

    def _separated(self, fields: Mapping[str, Any], path: str) -> str:
        """Write tags with a text between them."""
        tags = enumerate(_list(fields, "tags", path))
        any_tag = self.rules.rule(
            choice(
                self.format({"type": "tag", **_object(tag, place)}, place)
                for place, tag in ((f"{path}.tags[{i}]", one) for i, one in tags)
            )
        )
        between = self._constant(_text(fields, "separator", path))
        more = "" if _flag(fields, "stop_after_first", path) else f"({between} {any_tag})*"
        written = sequence(any_tag, more)
        return written if _flag(fields, "at_least_one", path) else f"({written})?"


def _repeated(tag: str, tail: str, fields: Mapping[str, Any], path: str) -> str:
    """Write free text with as many tags as the options allow; `tail` is text without a tag."""
    needed = _flag(fields, "at_least_one", path)
    if not tag:
        return tail
    if _flag(fields, "stop_after_first", path):
        return tag if needed else choice([tag, tail])
    return f"{tag}{'+' if needed else '*'} {tail}"


def _free(excluded: Sequence[str]) -> str:
    """Write any text without some others in it."""
    if not excluded:
        return ANYTHING
    return f"{ANYTHING} & ~/(?s:.*)(?:{'|'.join(map(as_pattern, excluded))})(?s:.*)/"


def _slashed(pattern: str) -> str:
    """Write an expression in Lark."""
    # A slash would end it.
    inner = re.sub(r"\\.|/", lambda at: r"\/" if at[0] == "/" else at[0], pattern, flags=re.DOTALL)
    return f"/{inner}/" if pattern else quoted("")


# -- fields


def _get(fields: Mapping[str, Any], name: str, path: str) -> Any:
    if fields.get(name) is None:
        raise InvalidRequestError.at(f"{path}.{name}", "is required.")
    return fields[name]


def _object(given: Any, path: str) -> dict[str, Any]:
    if not isinstance(given, dict):
        raise InvalidRequestError.at(path, "must be an object.")
    return given


def _text(fields: Mapping[str, Any], name: str, path: str) -> str:
    if not isinstance(value := _get(fields, name, path), str):
        raise InvalidRequestError.at(f"{path}.{name}", "must be text.")
    return value


def _list(fields: Mapping[str, Any], name: str, path: str) -> list[Any]:
    if not isinstance(value := _get(fields, name, path), list) or not value:
        raise InvalidRequestError.at(f"{path}.{name}", "must be a list, and not empty.")
    return value


def _texts(fields: Mapping[str, Any], name: str, path: str) -> list[str]:
    value = fields.get(name, [])
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise InvalidRequestError.at(f"{path}.{name}", "must be a list of texts.")
    return value


def _flag(fields: Mapping[str, Any], name: str, path: str) -> bool:
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequestError.at(f"{path}.{name}", "must be true or false.")
    return bool(value)
