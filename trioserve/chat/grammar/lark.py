"""Collects the rules of a grammar that the backend completes with what its vocabulary has.

The backend compiles it (`trioserve.types.Grammar`, kind "tools"). Its source is a JSON object:

* ``rules``: lines in llguidance's Lark notation; the first rule is ``start``;
* ``markers``: texts by the names of rules. Where the vocabulary has control tokens by names in
  such a text, both those tokens and the text as characters are meant;
* ``texts``: by the names of rules, free text that does not hold its end marker, and that marker:
  ``{"body": <regular expression, in Lark>, "end": <marker>}``;
* ``schemas``: by the names of rules, JSON Schemas, each with the field of the request it is from:
  ``{"schema": …, "param": "tools[0].function.parameters"}``;
* ``checks``: a list of such schemas, of which single parts are in rules.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from trioserve.types import Grammar

#: Any text.
ANYTHING = "/(?s:.*)/"
#: Whitespace where the parsers skip it, as in JSON; a weak model comes to its end.
SPACE = r"/([ ]|\n{1,2}[ \t]{0,20})?/"


class Rules:
    """A grammar in the making. The methods give names of rules, or parts of Lark."""

    def __init__(self) -> None:
        self._lines: dict[str, str] = {}
        self._terminals: dict[str, str] = {}
        self._named: list[str] = []
        self._markers: dict[str, str] = {}
        self._texts: dict[tuple[str, str], str] = {}
        self._schemas: dict[str, str] = {}
        self._checks: list[dict[str, Any]] = []

    def rule(self, body: str) -> str:
        """Add a rule, unless there is the same one."""
        if body not in self._lines:
            self._lines[body] = f"r{len(self._lines)}"
        return self._lines[body]

    def terminal(self, body: str) -> str:
        """Add a regular expression, unless there is the same one."""
        if body not in self._terminals:
            self._terminals[body] = f"W{len(self._terminals)}"
        return self._terminals[body]

    def later(self) -> str:
        """Name a rule that others can refer to before it is there."""
        self._named.append("")
        return f"v{len(self._named) - 1}"

    def define(self, name: str, body: str) -> None:
        """Add the rule that `later` gave a name."""
        self._named[int(name[1:])] = body

    @property
    def space(self) -> str:
        """Whitespace, or none."""
        return self.rule(SPACE)

    def marker(self, text: str) -> str:
        """Add a text that the model may write as control tokens."""
        return self._markers.setdefault(text, f"m{len(self._markers)}")

    def text(self, body: str, end: str) -> str:
        """Add text that goes up to a marker, and the marker."""
        return self._texts.setdefault((body, end), f"t{len(self._texts)}")

    def schema(self, schema: Any, param: str) -> str:
        """Add JSON that a schema describes. Errors of the schema name `param`."""
        entry = json.dumps({"schema": schema, "param": param}, ensure_ascii=False)
        return self._schemas.setdefault(entry, f"s{len(self._schemas)}")

    def check(self, schema: Any, param: str) -> None:
        """Have a schema checked for what cannot be enforced, without a rule for it."""
        self._checks.append({"schema": schema, "param": param})

    def grammar(self, start: str, **fields: Any) -> Grammar:
        """Make the grammar: all of it matches `start`. The fields are those of `Grammar`."""
        lines = [f"start: {start}"]
        lines += [f"{name}: {body}" for body, name in self._lines.items()]
        lines += [f"{name}: {body}" for body, name in self._terminals.items()]
        lines += [f"v{i}: {body}" for i, body in enumerate(self._named)]
        source = {
            "rules": "\n".join(lines),
            "markers": {name: text for text, name in self._markers.items()},
            "texts": {name: {"body": b, "end": e} for (b, e), name in self._texts.items()},
            "checks": self._checks,
            "schemas": {name: json.loads(entry) for entry, name in self._schemas.items()},
        }
        return Grammar("tools", json.dumps(source, ensure_ascii=False), param="tools", **fields)


def quoted(text: str) -> str:
    """Write a literal."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def choice(parts: Iterable[str]) -> str:
    """Write alternatives, each once."""
    each = list(dict.fromkeys(parts))
    return each[0] if len(each) == 1 else f"({' | '.join(each)})"


def sequence(*parts: str) -> str:
    """Write what follows one another; empty parts are left out."""
    return " ".join(part for part in parts if part)
