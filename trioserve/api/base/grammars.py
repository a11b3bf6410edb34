"""The form of an output, in all the fields that requests have for it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from trioserve.api.base import limits
from trioserve.api.base.fields import (
    NAME,
    SCHEMA,
    Only,
    boolean,
    json_type,
    list_schema,
    named,
    object_schema,
    one_of,
    refuse_unsupported,
    required,
    strings,
    text,
)
from trioserve.chat.grammar.regular import as_pattern
from trioserve.chat.grammar.structural import structural_grammar
from trioserve.errors import InvalidRequestError
from trioserve.types import Grammar

#: The language of a grammar.
SYNTAX = one_of("lark", "regex")

_FORMATS = ("text", "json_object", "json_schema", "structural_tag", "grammar")
_SOURCE = {"type": "string", "maxLength": limits.MAX_SCHEMA}
_JSON = {**SCHEMA, "type": ["object", "boolean", "string"], "maxLength": limits.MAX_SCHEMA}
_CHOICES = list_schema(NAME, limits.MAX_INPUTS)
_TAG = {**SCHEMA, "type": ["object", "string"], "maxLength": limits.MAX_SCHEMA}

#: vLLM's options of structured outputs.
_OPTIONS: Mapping[str, Only] = {
    "disable_additional_properties": Only(False),
    "disable_any_whitespace": Only(False),
    "disable_fallback": Only(harmless="there is one library that enforces formats"),
    "whitespace_pattern": Only(""),
}
_OLD_OPTIONS: Mapping[str, Only] = {
    "guided_decoding_backend": Only(harmless="there is one library that enforces formats"),
    "guided_whitespace_pattern": Only(""),
}


@json_type(
    properties={
        "grammar": _SOURCE,
        "guided_choice": _CHOICES,
        "guided_grammar": _SOURCE,
        "guided_json": _JSON,
        "guided_json_object": {"type": "boolean"},
        "guided_regex": _SOURCE,
        "json_schema": {**SCHEMA, "type": ["object", "boolean"]},
        "response_format": SCHEMA,
        "structured_outputs": object_schema(
            choice=_CHOICES,
            grammar=_SOURCE,
            json=_JSON,
            json_object={"type": "boolean"},
            regex=_SOURCE,
            structural_tag=_TAG,
        ),
        "structural_tag": _TAG,
    },
    others=_OLD_OPTIONS,
)
def read_grammar(body: Mapping[str, Any]) -> Grammar | None:
    """Read what the output must look like; None where any text will do.

    Raises:
        InvalidRequestError: a field is wrong, or more than one says something.
    """
    refuse_unsupported(body, _OLD_OPTIONS)
    return _only(body, _READERS)


_Reader = Callable[[Any, str], Grammar | None]


def _only(
    given: Mapping[str, Any], readers: Mapping[str, _Reader], path: str = ""
) -> Grammar | None:
    """Read the one field that says something. Raises InvalidRequestError if there are two."""
    grammars = [
        grammar
        for name, read in readers.items()
        if (value := given.get(name)) is not None
        and (grammar := read(value, f"{path}{name}")) is not None
    ]
    if len(grammars) > 1:
        first, second = grammars[0].param, grammars[1].param
        raise InvalidRequestError(f"'{first}' and '{second}' exclude each other.", param=second)
    return grammars[0] if grammars else None


def _schema(value: Any, name: str) -> Grammar:
    if not isinstance(value, dict | bool):
        raise InvalidRequestError(f"The schema in '{name}' must be an object.", param=name)
    return Grammar("json_schema", json.dumps(value), param=name)


def _json(value: Any, name: str) -> Grammar:
    """Read a schema, which may be written as JSON."""
    if isinstance(value, str) and value:
        return Grammar("json_schema", value, param=name)
    return _schema(value, name)


def _json_object(value: Any, name: str) -> Grammar | None:
    return Grammar("json_object", param=name) if named(boolean, value, name) else None


def _regex(value: Any, name: str) -> Grammar:
    return Grammar("regex", named(text, value, name), param=name)


def _choice(value: Any, name: str) -> Grammar:
    choices = named(strings, value, name)
    if not choices:
        raise InvalidRequestError.at(name, "must not be empty.")
    return Grammar("regex", "|".join(map(as_pattern, dict.fromkeys(choices))), param=name)


_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


def _grammar(value: Any, name: str) -> Grammar | None:
    """Read a grammar in GBNF, or in Lark, which has no ``::=``."""
    source = named(text, value, name)
    if not source:
        return None
    return Grammar("gbnf" if _GBNF_RULE.search(source) else "lark", source, param=name)


def _llama_grammar(value: Any, name: str) -> Grammar | None:
    """Read llama-server's field: GBNF, or Lark that begins with ``%llguidance``."""
    if not value:
        return None
    if not isinstance(value, str):
        raise InvalidRequestError.at(name, "must be text, in GBNF.")
    kind = "lark" if value.startswith("%llguidance") else "gbnf"
    return Grammar(kind, value, param=name)


def _response_format(value: Any, name: str) -> Grammar | None:
    if not isinstance(value, dict) or value.get("type") not in _FORMATS:
        raise InvalidRequestError.at(name, f"must be an object with a type: {', '.join(_FORMATS)}.")
    match value["type"]:
        case "text":
            return None
        case "json_object":
            schema = value.get("schema")
            return Grammar("json_object", param=name) if schema is None else _schema(schema, name)
        case "structural_tag":
            return structural_grammar(value, name)
        case "grammar":
            return _format_grammar(value, name)
    inner = value.get("json_schema", value)
    if not isinstance(inner, dict) or "schema" not in inner:
        raise InvalidRequestError.at(
            name, "of type json_schema needs 'json_schema' with a 'schema'."
        )
    return _schema(inner["schema"], name)


def _format_grammar(value: Mapping[str, Any], name: str) -> Grammar | None:
    """Read a grammar with its syntax, as custom tools have it, or without."""
    if value.get("syntax") is None:
        return _grammar(value.get("grammar"), f"{name}.grammar")
    syntax, path = required(value, "syntax", SYNTAX, name), f"{name}.definition"
    return Grammar(syntax, named(text, value.get("definition"), path), param=path)


_KINDS: Mapping[str, _Reader] = {
    "choice": _choice,
    "grammar": _grammar,
    "json": _json,
    "json_object": _json_object,
    "regex": _regex,
    "structural_tag": structural_grammar,
}


def _structured(value: Any, name: str) -> Grammar | None:
    """Read vLLM's field, which has one of several in it."""
    if not isinstance(value, dict):
        raise InvalidRequestError.at(name, "must be an object.")
    refuse_unsupported(value, _OPTIONS, f"{name}.")
    for key in value:
        if key not in _KINDS and key not in _OPTIONS:
            known = ", ".join(_KINDS)
            raise InvalidRequestError.at(f"{name}.{key:.80}", f"is not known; there are {known}.")
    grammar = _only(value, _KINDS, f"{name}.")
    if grammar is None and value.get("json_object") is not False:
        raise InvalidRequestError.at(name, f"must have one of {', '.join(_KINDS)}.")
    return grammar


_READERS: Mapping[str, _Reader] = {
    "grammar": _llama_grammar,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "guided_json": _json,
    "guided_json_object": _json_object,
    "guided_regex": _regex,
    "json_schema": _schema,
    "response_format": _response_format,
    "structured_outputs": _structured,
    "structural_tag": structural_grammar,
}
