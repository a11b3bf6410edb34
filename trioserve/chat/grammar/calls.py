"""Grammars of tool calls, made of the description that the parser reads them by.

A grammar allows what the parser reads, and of that what a model would write: declared functions
alone, arguments by their schemas, no part left out.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, assert_never

import attrs

from trioserve.chat.formats.syntax import (
    Choice,
    Elements,
    Ignore,
    JsonArguments,
    JsonCall,
    JsonContent,
    Literals,
    Maybe,
    Name,
    OneOf,
    Parameters,
    QuotedName,
    Step,
    Text,
    ToolCalls,
)
from trioserve.chat.grammar.arguments import ElementWriter, LiteralWriter, ParameterWriter
from trioserve.chat.grammar.lark import Rules, choice, quoted, sequence
from trioserve.chat.grammar.schemas import (
    Part,
    check_depth,
    check_is_object,
    closed,
    enforceable,
)
from trioserve.chat.tool_choice import ToolChoice, name_of
from trioserve.errors import InvalidRequestError

_WRITABLE_NAME = re.compile(r"[^\s<>{}()\[\]\"'`]{1,200}")
_COUNTED_NAME = re.compile(r".*:[0-9]+", re.DOTALL)
#: An id, and what may stand around it: ``" index="1``.
_ID = r"/[A-Za-z0-9_ \"=.:\-]{0,64}/"
#: The value of a member that says nothing a client needs.
_IGNORED = r"/\"[A-Za-z0-9_\-]{0,64}\"|0|[1-9][0-9]{0,8}/"
_NO_ARGUMENTS: dict[str, Any] = {
    "type": "object",
    "properties": {},
    "additionalProperties": False,
}


@attrs.frozen
class Function:
    """A function that may be called: its name, the schema of its arguments, where it stands."""

    name: str
    arguments: Part
    path: str

    def refuse_name(self) -> InvalidRequestError:
        """Make the error that says that the model's notation has no place for the name."""
        param = f"{self.path}.name"
        return InvalidRequestError(
            f"'{param}' is {self.name!r:.100}, which this model cannot write.", param=param
        )


def functions_of(tools: Sequence[Mapping[str, Any]], choice: ToolChoice) -> list[Function]:
    """Read the functions that a choice allows.

    Raises:
        InvalidRequestError: the arguments of one are not an object.
    """
    found = []
    for i, tool in enumerate(tools):
        name = name_of(tool)
        if choice.names is not None and name not in choice.names:
            continue
        path = f"tools[{i}].function"
        function = tool.get("function", tool)
        schema = function.get("parameters")
        given = Part(_NO_ARGUMENTS if schema is None else schema, None, f"{path}.parameters")
        if not isinstance(given.schema, Mapping):
            raise given.refuse("it must be an object")
        check_depth(given)
        schema = enforceable(given.schema, strict=function.get("strict") is True)
        arguments = check_is_object(Part(schema, schema, given.param))
        found.append(Function(name, closed(arguments), path))
    return found


class CallWriter:
    """Writes single calls."""

    def __init__(self, rules: Rules, functions: Sequence[Function]) -> None:
        self._rules = rules
        self._functions = functions
        for function in functions:
            rules.check(function.arguments.schema, function.arguments.param)

    def write(self, steps: Sequence[Step]) -> str:
        """Write the steps of a call of any of the functions.

        Raises:
            InvalidRequestError: the name of a function cannot be written so, or the schema of
                its arguments not be enforced.
        """
        steps = _chosen(steps)
        calls = (sequence(*self._steps(steps, function)) for function in self._functions)
        return self._rules.rule(choice([self._rules.rule(call) for call in calls]))

    def opening(self, steps: Sequence[Step]) -> str:
        """Write the steps before the first call."""
        nobody = Function("", Part({}, {}, ""), "")
        return sequence(*self._steps(_chosen(steps), nobody))

    def _steps(self, steps: Sequence[Step], function: Function) -> Iterator[str]:
        before: Step | None = None
        for step in steps:
            joined = isinstance(step, Text) and isinstance(before, Name | Ignore)
            if not joined and not isinstance(step, Name | Ignore | Literals):
                yield self._rules.space
            yield self._step(step, before, function)
            before = step

    def _step(self, step: Step, before: Step | None, function: Function) -> str:
        rules, arguments = self._rules, function.arguments
        match step:
            case Text(text):
                return rules.marker(text)
            case OneOf(texts) | Maybe(texts):
                return choice(rules.marker(text) for text in texts)
            case Ignore():
                return self._ignored(step, before)
            case Name():
                return self._name(step, function)
            case QuotedName():
                return quoted(_quoted_name(function))
            case JsonArguments():
                return rules.schema(arguments.whole, arguments.param)
            case JsonCall():
                return self._json_call(step, function)
            case Parameters():
                return ParameterWriter(rules, step).write(arguments)
            case Literals():
                return LiteralWriter(rules, step).write(arguments)
            case Elements():
                return ElementWriter(rules, step).write(arguments)
            case JsonContent() | Choice():
                raise AssertionError("these steps are no part of a call")
        assert_never(step)

    def _name(self, step: Name, function: Function) -> str:
        name = function.name
        if not _WRITABLE_NAME.fullmatch(name) or (step.counted and _COUNTED_NAME.fullmatch(name)):
            raise function.refuse_name()
        counter = self._rules.rule("/:[0-9]{1,3}/") if step.counted else ""
        blanks = [text for text in step.until if not text.strip()]
        end = choice(map(quoted, blanks)) if blanks else ""
        return sequence(quoted(step.prefix + name), counter, end)

    def _ignored(self, step: Ignore, before: Step | None) -> str:
        """Write text that is not looked at. After a name it begins with what ends the name."""
        free = self._rules.rule(_ID)
        if not isinstance(before, Name):
            return free
        ways = [
            "" if text in step.until else sequence(self._rules.marker(text), free)
            for text in before.until
        ]
        written = choice(way for way in ways if way)
        return f"({written})?" if "" in ways else written

    def _json_call(self, step: JsonCall, function: Function) -> str:
        """Write a call as an object, with members that say nothing before or after the others."""
        rules, space = self._rules, self._rules.space
        schema = rules.schema(function.arguments.whole, function.arguments.param)
        colon = rules.rule(f'{space} ":" {space}')
        comma = rules.rule(f'{space} "," {space}')
        name = sequence(
            choice(quoted(f'"{key}"') for key in step.name_keys),
            colon,
            quoted(_quoted_name(function)),
        )
        keys = choice(quoted(f'"{key}"') for key in step.arguments_keys)
        pair = rules.rule(sequence(name, comma, keys, colon, schema))
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


class GroupWriter:
    """Writes groups of calls, as they stand in a message.

    Args:
        rules: where rules go.
        syntax: of the calls.
        functions: that may be called.
        parallel: whether there may be several calls.
    """

    def __init__(
        self, rules: Rules, syntax: ToolCalls, functions: Sequence[Function], *, parallel: bool
    ) -> None:
        self._rules = rules
        self._syntax = syntax
        self._parallel = parallel
        self._calls = CallWriter(rules, functions)
        self._call = self._calls.write(syntax.call)

    def whole(self) -> str:
        """Write all that a message has from its first call on."""
        group = self._group()
        if not self._parallel or self._syntax.bare:
            return group
        return sequence(group, f"({self._rules.space} {group})*")

    def rest(self, read: int) -> str:
        """Write what follows the text that shows that a call begins.

        Args:
            read: how many steps of the opening, or of the call, were in that text.
        """
        syntax = self._syntax
        # Where it was a part of the call, what was before it, and closes with it, is not known.
        in_call = read > 0 and not syntax.opening
        opening = "" if in_call else self._calls.opening(syntax.opening[read:])
        first = self._calls.write(syntax.call[read:]) if in_call else self._call
        closing = self._closing()
        closing = f"({closing})?" if in_call and closing else closing
        rest = sequence(opening, first, self._more(), closing)
        if not self._parallel or not self._heads:
            return rest
        return sequence(rest, f"({self._rules.space} {self._group(headed=True)})*")

    @property
    def _heads(self) -> list[str]:
        """The markers that begin a group, without those that are a part of a call."""
        return [text for text in self._syntax.starts if text not in self._syntax.again]

    def _group(self, *, headed: bool = False) -> str:
        """Write one group. The first one of a message may have no marker, in some formats."""
        heads = [self._rules.marker(text) for text in self._heads]
        head = choice(heads) if heads else ""
        head = f"({head})?" if head and self._syntax.bare and not headed else head
        opening = self._calls.opening(self._syntax.opening)
        return self._rules.rule(sequence(head, opening, self._call, self._more(), self._closing()))

    def _more(self) -> str:
        """Write further calls of the same group."""
        syntax, space = self._syntax, self._rules.space
        if not self._parallel or not (syntax.between or syntax.again):
            return ""
        gap = space if isinstance(syntax.call[0], Name) else ""
        ways = [
            sequence(space, self._rules.marker(text), gap, self._call) for text in syntax.between
        ]
        ways += [self._call] if syntax.again else []
        return f"{choice(ways)}*" if len(ways) > 1 else f"({ways[0]})*"

    def _closing(self) -> str:
        syntax, rules = self._syntax, self._rules
        closing = [sequence(rules.space, rules.marker(text)) for text in syntax.closing]
        if len(syntax.starts) == len(closing) > 1:  # each start has an end of its own
            return choice(closing)
        return sequence(*closing)


def _chosen(steps: Sequence[Step]) -> list[Step]:
    """Take those steps of each choice that lead to a call."""
    chosen: list[Step] = []
    for step in steps:
        if isinstance(step, Choice):
            says = any(isinstance(one, JsonContent) for one in step.steps)
            chosen += _chosen(step.otherwise if says else step.steps)
        else:
            chosen.append(step)
    return chosen


def _quoted_name(function: Function) -> str:
    if not function.name:
        raise function.refuse_name()
    return json.dumps(function.name, ensure_ascii=False)
