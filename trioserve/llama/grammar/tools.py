"""Grammars of tool calls in Lark: their markers may be control tokens of the vocabulary.

`trioserve.chat.grammar.lark` describes what comes in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from trioserve.llama.grammar import json_schema
from trioserve.types import TokenId

_SPECIAL = re.compile(r"[\\^$.|?*+()\[\]{}/&~#\-]")


class ToolSchemaError(Exception):
    """The schema of a tool cannot be used: the message says why, and `param` which tool's it is."""

    def __init__(self, param: str, problem: str) -> None:
        super().__init__(problem)
        self.param = param


def to_lark(
    source: str, control: Mapping[str, TokenId], ends: frozenset[TokenId], options: Any
) -> str:
    """Write a grammar in Lark.

    Args:
        source: the parts of the grammar, as JSON.
        control: control tokens by name.
        ends: tokens that end an output, wherever they come.
        options: llguidance's, for JSON.

    Raises:
        ToolSchemaError: a schema cannot be enforced.
    """
    parts = json.loads(source)
    for entry in parts["checks"]:
        _checked(entry)
    lines = [parts["rules"]]
    for name, text in parts["markers"].items():
        lines.append(f"{name}: {_marker(text, control, ends)}")
    for name, entry in parts["texts"].items():
        lines += _text(name, entry["body"], entry["end"], control, ends)
    for name, entry in parts["schemas"].items():
        schema = _checked(entry)
        lines.append(f"{name}: %json {json.dumps({**schema, 'x-guidance': options})}")
    return "\n".join([*lines, ""])


def blame(source: str, attempt: Callable[[Any], object]) -> None:
    """Raise for the schema that makes a grammar unusable, if a single one does.

    Args:
        source: the grammar.
        attempt: compiles a schema, or raises SchemaError.

    Raises:
        ToolSchemaError: for that schema.
    """
    for entry in json.loads(source)["schemas"].values():
        try:
            attempt(_checked(entry))
        except json_schema.SchemaError as error:
            raise ToolSchemaError(entry["param"], str(error)) from None


def _checked(entry: Mapping[str, Any]) -> Any:
    try:
        return json_schema.read(json.dumps(entry["schema"]))
    except json_schema.SchemaError as error:
        raise ToolSchemaError(entry["param"], str(error)) from None


def _marker(text: str, control: Mapping[str, TokenId], ends: frozenset[TokenId]) -> str:
    written = _quoted(text)
    tokens = _tokens(text, control, ends)
    return written if tokens is None else f"{written} | {' '.join(tokens)}"


def _tokens(
    text: str, control: Mapping[str, TokenId], ends: frozenset[TokenId]
) -> list[str] | None:
    """Write a text as text and control tokens; None if it has no name of a control token.

    A control token that ends the output ends the text too.
    """
    names = sorted((name for name in control if name in text), key=len, reverse=True)
    if not names:
        return None
    parts = []
    for piece in re.split(f"({'|'.join(map(re.escape, names))})", text):
        if piece not in control:
            parts += [_quoted(piece)] if piece else []
        elif control[piece] in ends:
            break
        else:
            parts.append(f"<[{control[piece]}]>")
    return parts or ['""']


def _text(
    name: str, body: str, end: str, control: Mapping[str, TokenId], ends: frozenset[TokenId]
) -> list[str]:
    """Write text up to its end marker, as one lexeme because lexemes are greedy."""
    terminal = name.upper()
    # Blanks before the marker are a part of it, but the body may not hold it without them either.
    found = _pattern(end.strip() or end)
    lines = [f"{terminal}_BODY: {body} & ~/(?s:.*){found}(?s:.*)/"]
    lines.append(f"{terminal}: {terminal}_BODY {_quoted(end)}")
    tokens = _tokens(end, control, ends)
    if tokens is None:
        return [*lines, f"{name}: {terminal}"]
    # What comes before the first token must be in the lexeme too, which would take it otherwise.
    n_before = 1 if tokens[0].startswith('"') else 0
    lines.append(f"{terminal}_ALONE: {' '.join([f'{terminal}_BODY', *tokens[:n_before]])}")
    rest = " ".join([f"{terminal}_ALONE", *tokens[n_before:]])
    return [*lines, f"{name}: {terminal} | {rest}"]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _pattern(text: str) -> str:
    """Write a text as a regular expression."""
    escaped = _SPECIAL.sub(lambda found: f"\\{found[0]}", text)
    return escaped.replace("\n", "\\n").replace("\t", "\\t").replace("\r", "\\r")
