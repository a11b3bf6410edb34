"""Chats as plain text, for models that have no template and no tokens for one.

A base model knows no markers of turns, and would write those of ChatML letter by letter. It does
know transcripts: a role's name, then its text. The answer ends where the next name begins.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable

import attrs

from trioserve.chat.template.builtin import template_named

_ROLES = ("system", "user", "assistant", "tool")


@attrs.frozen
class PlainText:
    """A way to write a transcript."""

    is_capital: bool = True
    mark: str = ":"
    line: str = "\n"

    @property
    def names(self) -> dict[str, str]:
        return {role: role.title() if self.is_capital else role for role in _ROLES}

    @property
    def heads(self) -> list[str]:
        return [name + self.mark for name in self.names.values()]

    @property
    def source(self) -> str:
        """The template in Jinja: the one that is called "plain", and what differs from it."""
        template = template_named("plain")
        if self == PlainText():
            return template
        variables = {"names": self.names, "mark": self.mark, "line": self.line}
        sets = (f"{{%- set {name} = {json.dumps(each)} -%}}" for name, each in variables.items())
        return "".join((*sets, "\n", template))

    @property
    def ends(self) -> tuple[str, ...]:
        """The beginnings of the next turn."""
        return tuple(gap + head for gap in (self.line, 2 * self.line) for head in self.heads)


#: The ways to write one, the best first.
_WAYS = [PlainText(*way) for way in itertools.product((True, False), (":", ""), ("\n", " "))]


def plain_for(can_write: Callable[[str], bool]) -> str:
    """Choose the template of a model by what its vocabulary can write."""
    found = (way for way in _WAYS if can_write(way.line.join(way.heads)))
    return next(found, _WAYS[0]).source


def turn_ends(source: str) -> tuple[str, ...]:
    """The texts that end an answer, if a template is plain text; others have tokens for that."""
    return next((way.ends for way in _WAYS if way.source == source), ())
