"""Writes the steps of a call as rules of a grammar."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import assert_never

from trioserve.chat.formats.syntax import (
    Choice,
    Elements,
    Ignore,
    JsonArguments,
    JsonCall,
    JsonContent,
    Literals,
    Marker,
    Maybe,
    Name,
    OneOf,
    Parameters,
    QuotedName,
    Step,
)
from trioserve.chat.grammar.schemas import ARGUMENTS, NAME, Rules, choice, quoted, sequence

#: An id, and what may stand around it: ``" index="1``.
_ID = r"/[A-Za-z0-9_ \"=.:\-]{0,64}/"
#: The value of a member that clients do not need.
_IGNORED = r"/\"[A-Za-z0-9_\-]{0,64}\"|0|[1-9][0-9]{0,8}/"


def chosen(steps: Sequence[Step]) -> list[Step]:
    """Take those steps of each choice that a grammar has."""
    found: list[Step] = []
    for step in steps:
        if isinstance(step, Choice):
            found += chosen(step.otherwise if step.writes_others else step.steps)
        else:
            found.append(step)
    return found


class StepWriter:
    """Writes the steps of calls as rules."""

    def __init__(self) -> None:
        self._rules = Rules()

    def _steps(self, steps: Sequence[Step]) -> Iterator[str]:
        before: Step | None = None
        for step in steps:
            joined = isinstance(step, Marker) and isinstance(before, Name | Ignore)
            if not joined and not isinstance(step, Name | Ignore | Literals):
                yield self._rules.space
            yield self._step(step, before)
            before = step

    def _step(self, step: Step, before: Step | None) -> str:
        rules = self._rules
        match step:
            case Marker(text):
                return rules.marker(text)
            case OneOf(texts) | Maybe(texts):
                return choice(rules.marker(text) for text in texts)
            case Ignore():
                return self._ignored(step, before)
            case Name():
                return self._name(step)
            case QuotedName():
                return NAME
            case JsonCall():
                return self._json_call(step)
            case JsonArguments() | Parameters() | Literals() | Elements():
                return ARGUMENTS
            case JsonContent() | Choice():
                raise AssertionError("these steps are no part of a call")
        assert_never(step)

    def _name(self, step: Name) -> str:
        counter = self._rules.rule("/:[0-9]{1,3}/") if step.counted else ""
        blanks = [text for text in step.until if not text.strip()]
        end = choice(map(quoted, blanks)) if blanks else ""
        return sequence(NAME, counter, end)

    def _ignored(self, step: Ignore, before: Step | None) -> str:
        """Write text that is ignored. After a name it begins with the end of the name."""
        free = self._rules.rule(_ID)
        if not isinstance(before, Name):
            return free
        ways = [
            "" if text in step.until else sequence(self._rules.marker(text), free)
            for text in before.until
        ]
        written = choice(way for way in ways if way)
        return f"({written})?" if "" in ways else written

    def _json_call(self, step: JsonCall) -> str:
        """Write a call as an object, with members that say nothing before or after the others."""
        rules, space = self._rules, self._rules.space
        colon = rules.rule(f'{space} ":" {space}')
        comma = rules.rule(f'{space} "," {space}')
        name = sequence(choice(quoted(f'"{key}"') for key in step.name_keys), colon, NAME)
        keys = choice(quoted(f'"{key}"') for key in step.arguments_keys)
        pair = rules.calls(sequence(name, comma, keys, colon, ARGUMENTS))
        ways = []
        for places in itertools.product("-<>", repeat=len(step.ignored_keys)):
            members = dict.fromkeys("<>", "")
            for key, place in zip(step.ignored_keys, places, strict=True):
                member = sequence(quoted(f'"{key}"'), colon, rules.rule(_IGNORED))
                if place == "<":
                    members["<"] = sequence(members["<"], member, comma)
                elif place == ">":
                    members[">"] = sequence(members[">"], comma, member)
            ways.append(sequence(members["<"], pair, members[">"]))
        return sequence('"{"', space, choice(ways), space, '"}"')
