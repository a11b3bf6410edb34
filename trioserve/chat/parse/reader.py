"""Reads a tool call by the steps that describe it."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping
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
    first_of,
    held_back,
)
from trioserve.chat.grammar.kinds import ANYTHING, Shape
from trioserve.chat.json_scanner import WHITESPACE, JsonScanner, State
from trioserve.chat.parse.arguments import ElementReader, LiteralReader, ParameterReader
from trioserve.chat.parse.cursor import (
    SURROGATE,
    Cursor,
    Reading,
    Refused,
    is_text,
)

_MAX_NAME = 200
_NO_NAME = re.compile(r"[\s<>{}()\[\]\"'`]")
_COUNTER = re.compile(r":[0-9]+$")


#: The first half of a surrogate pair, written as an escape.
_HALF = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}$")


class _Complete(Exception):  # noqa: N818 - it ends the steps, and is not an error
    """The call has ended early."""


class CallReader:
    """Reads one call.

    `name` is set as soon as it is known; from then on `take` gives the arguments as they come.
    Or else it turns out to be content, and `is_content` is set; then `take` gives that.
    """

    def __init__(self, steps: tuple[Step, ...], shapes: Mapping[str, Shape]) -> None:
        self.state = State.OPEN
        self.is_content = False
        self._cursor = Cursor()
        self._shapes = shapes
        self._run = self._steps(steps)

    @property
    def name(self) -> str | None:
        return self._cursor.name

    @property
    def unread(self) -> str:
        """The text that has been read, and is in neither `name` nor what `take` gave."""
        return self._cursor.loose

    @property
    def _shape(self) -> Shape:
        return self._shapes.get(self.name or "", ANYTHING)

    def take(self) -> str:
        return self._cursor.taken()

    def feed(self, text: str, *, final: bool = False) -> int:
        """Read on. Gives the number of characters read; the others must come again, with more.

        With `final` no more text comes, and `take` gives what was held back too.
        """
        cursor = self._cursor
        cursor.text, cursor.at, cursor.final = text, 0, final
        try:
            next(self._run)
        except (StopIteration, _Complete):
            self.state = State.DONE
        except Refused:
            self.state = State.FAILED
        return cursor.at

    def _steps(self, steps: tuple[Step, ...]) -> Reading:
        for step in steps:
            yield from self._step(step)

    def _step(self, step: Step) -> Reading:
        cursor = self._cursor
        match step:
            case Marker(text):
                return cursor.one_of((text,))
            case OneOf(texts):
                return cursor.one_of(texts)
            case Maybe(texts):
                return cursor.maybe(texts)
            case Ignore():
                return self._ignore(step)
            case Name():
                return self._name(step)
            case QuotedName():
                return self._quoted_name()
            case JsonArguments():
                return self._json_arguments()
            case JsonCall():
                return self._json_call(step)
            case Parameters():
                return ParameterReader(cursor, step, self._shape).read()
            case Literals():
                return LiteralReader(cursor, step).read()
            case Elements():
                return ElementReader(cursor, step, self._shape).read()
            case JsonContent():
                return self._json_content()
            case Choice():
                return self._choice(step)
        assert_never(step)

    def _choice(self, step: Choice) -> Iterator[None]:
        cursor = self._cursor
        yield from cursor.space()
        while (found := cursor.find((step.start,))) is None:
            yield
        yield from self._steps(step.steps if found == 0 else step.otherwise)

    def _ignore(self, step: Ignore) -> Iterator[None]:
        cursor = self._cursor
        ignored = yield from cursor.until(step.until, _MAX_NAME)
        cursor.skip(len(ignored))

    def _name(self, step: Name) -> Iterator[None]:
        cursor = self._cursor
        yield from cursor.space()
        while True:
            place, _ = first_of(cursor.rest, step.until)
            end = place
            if place < 0:
                end = len(cursor.rest) - held_back(cursor.rest, step.until)
            name = cursor.rest[:end]
            # Whitespace may follow the name, and only then is there an end to it.
            if _NO_NAME.search(name.rstrip(WHITESPACE)) or len(name) > _MAX_NAME:
                raise Refused
            if place >= 0:
                break
            yield
        cursor.skip(place)
        name = name.rstrip(WHITESPACE).removeprefix(step.prefix)
        cursor.give_name(_COUNTER.sub("", name) if step.counted else name)

    def _quoted_name(self) -> Iterator[None]:
        self._cursor.give_name((yield from self._cursor.string()))

    def _json_arguments(self) -> Iterator[None]:
        cursor = self._cursor
        yield from cursor.space()
        if cursor.text[cursor.at] == "{":
            yield from cursor.json(streams=True)
        else:
            cursor.give("{}")

    def _json_content(self) -> Iterator[None]:
        cursor = self._cursor
        yield from cursor.space()
        if cursor.text[cursor.at] != '"':
            raise Refused
        scanner = JsonScanner()
        held = ""
        opened = False  # whether the quote has been dropped
        self.is_content = True
        while True:
            cursor.skip(scanner.feed(cursor.text, cursor.at) - cursor.at)
            held += scanner.take()
            if not opened:
                opened, held = True, held[1:]
            state = scanner.state
            if state is State.DONE:
                cursor.give(_unescaped(held[:-1]))
                raise _Complete
            half = 6 if state is State.OPEN and not cursor.final and _HALF.search(held) else 0
            ready, held = held[: len(held) - half], held[len(held) - half :]
            cursor.give(_unescaped(ready))
            cursor.loose = held + scanner.pending
            if state is State.FAILED:
                raise Refused
            if cursor.final:
                cursor.give(scanner.pending)
            yield

    def _json_call(self, step: JsonCall) -> Iterator[None]:
        """Read a call written as one object. Arguments before the name wait until it is known."""
        cursor = self._cursor
        keys = [*step.name_keys, *step.arguments_keys, *step.ignored_keys]
        arguments: str | None = None
        end = "{"
        while end != "}":
            yield from cursor.one_of((end,))
            key = (yield from cursor.one_of(tuple(f'"{key}"' for key in keys)))[1:-1]
            group = next(
                (some for some in (step.name_keys, step.arguments_keys) if key in some), (key,)
            )
            keys = [one for one in keys if one not in group]
            yield from cursor.one_of((":",))
            if group == step.name_keys:
                cursor.give_name((yield from cursor.string()))
                if arguments is not None:
                    cursor.give(arguments)
            elif group == step.arguments_keys:
                arguments = yield from self._member_arguments()
            else:
                yield from cursor.json()
            yield from cursor.space()
            end = cursor.text[cursor.at]
            if end not in (",", "}") or (end == "}" and cursor.name is None):
                raise Refused
        cursor.skip(1)
        cursor.give("{}" if arguments is None else "")

    def _member_arguments(self) -> Generator[None, None, str]:
        cursor = self._cursor
        yield from cursor.space()
        is_plain = cursor.text[cursor.at] in '"n'
        is_named = cursor.name is not None
        arguments = yield from cursor.json(streams=is_named and not is_plain, gives_rest=is_named)
        if is_plain:
            arguments = _plain_arguments(arguments)
            cursor.give(arguments if is_named else "")
        return arguments


def _unescaped(text: str) -> str:
    """Read a part of the inside of a JSON string. Halves of surrogate pairs cannot be sent on."""
    value: str = json.loads(f'"{text}"')
    return value if is_text(value) else SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)


def _plain_arguments(text: str) -> str:
    """Give the arguments of a call that has null for them, or an object written as a string."""
    value = json.loads(text)
    if value is None:
        return "{}"
    try:
        if isinstance(json.loads(value), dict) and is_text(value):
            return str(value)
    except (ValueError, RecursionError):
        pass  # any other string is passed on as it was written
    return text
