"""Reads a tool call by the steps that describe it."""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Iterator, Mapping
from typing import assert_never

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
)
from trioserve.chat.json_scanner import WHITESPACE, JsonScanner, State
from trioserve.chat.parse.arguments import ElementReader, LiteralReader, ParameterReader
from trioserve.chat.parse.cursor import Cursor, Reading, Refused, first_of, held_back, is_text


class _At(enum.Enum):
    BRACE = enum.auto()
    KEY_OR_END = enum.auto()
    KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    COMMA_OR_END = enum.auto()


class JsonCallReader:
    """Reads a call written as one JSON object.

    `name` is set as soon as it is known; from then on `take` gives the arguments as they come.
    `loose` is what has been read but is in neither: the skeleton of the object around them.
    """

    def __init__(self, syntax: JsonCall) -> None:
        self.state = State.OPEN
        self.name: str | None = None
        self.loose = ""
        self._syntax = syntax
        self._at = _At.BRACE
        self._key = ""
        self._role = ""  # what the value of the present member is: name, arguments or ignored
        self._value = JsonScanner()
        self._seen: set[str] = set()
        self._arguments: JsonScanner | None = None
        self._ready = ""  # arguments that do not come straight from their scanner

    # -- what has been read

    def take(self) -> str:
        """Give the arguments that have come since the last time, once the name is known."""
        fresh, self._ready = self._ready, ""
        if self._arguments is not None:
            fresh += self._arguments.take()
        return fresh

    def cut_off(self) -> str:
        """Say that no more text comes; gives what `take` still holds back."""
        if self._at is _At.VALUE and self._role == "arguments":
            return self.take() + self._value.take() + self._value.pending
        return self.take()

    @property
    def unread(self) -> str:
        """What has been read, but is in neither `name` nor what `take` gave."""
        held = self._arguments.pending if self._arguments is not None else ""
        return self.loose + held

    # -- reading

    def feed(self, text: str, at: int = 0) -> int:
        """Read on, from `at`. Gives the place of the first character that was not read."""
        while at < len(text) and self.state is State.OPEN:
            if self._at is _At.VALUE:
                at = self._read_value(text, at)
            elif (text[at] in WHITESPACE and not self._key) or self._read_skeleton(text[at]):
                self.loose += text[at]
                at += 1
            else:
                self.state = State.FAILED
        if self.state is State.DONE:
            self.loose = ""
        return at

    def _read_skeleton(self, character: str) -> bool:
        if self._at is _At.BRACE:
            self._at = _At.KEY_OR_END
            return character == "{"
        if self._at is _At.COLON:
            self._at = _At.VALUE
            self._value = JsonScanner()
            return character == ":"
        if self._at is _At.COMMA_OR_END:
            self._at = _At.KEY
            return character == "," or (character == "}" and self._end())
        if character == "}" and self._at is _At.KEY_OR_END and not self._key:
            return self._end()
        return self._read_key(character)

    def _read_key(self, character: str) -> bool:
        """Read a character of a key. Keys with escapes are not recognised; no model writes any."""
        self._key += character
        keys = [f'"{key}"' for key in self._keys() if key not in self._seen]
        if self._key in keys:
            self._at = _At.COLON
            self._role = self._role_of(self._key[1:-1])
            self._seen.update(self._same_role(self._key[1:-1]))
            self._key = ""
            return True
        return any(key.startswith(self._key) for key in keys)

    def _keys(self) -> tuple[str, ...]:
        syntax = self._syntax
        return syntax.name_keys + syntax.arguments_keys + syntax.ignored_keys

    def _role_of(self, key: str) -> str:
        if key in self._syntax.name_keys:
            return "name"
        return "arguments" if key in self._syntax.arguments_keys else "ignored"

    def _same_role(self, key: str) -> tuple[str, ...]:
        for keys in (self._syntax.name_keys, self._syntax.arguments_keys):
            if key in keys:
                return keys
        return (key,)

    def _read_value(self, text: str, at: int) -> int:
        scanner = self._value
        if not scanner.begun and text[at] in WHITESPACE:
            self.loose += text[at]
            return at + 1
        if not scanner.begun:
            if self._role == "name" and text[at] != '"':
                self.state = State.FAILED
                return at
            if self._role == "arguments" and text[at] not in '"n':
                self._arguments = scanner  # streams
                self.loose = ""
        end = scanner.feed(text, at)
        if scanner is not self._arguments:
            self.loose += text[at:end]
        if scanner.state is State.FAILED:
            self.state = State.FAILED
        elif scanner.state is State.DONE:
            self._at = _At.COMMA_OR_END
            self._end_value(scanner)
        return end

    def _end_value(self, scanner: JsonScanner) -> None:
        if self._role == "name":
            name = json.loads(scanner.text)
            if not name or not is_text(name):
                self.state = State.FAILED
                return
            self.name = name
            self.loose = ""
        elif self._role == "arguments" and self._arguments is None:
            self._ready = _plain_arguments(scanner.text)
            self.loose = ""

    def _end(self) -> bool:
        """Take the closing brace, if this is a call."""
        if self.name is None:
            return False
        if not self._seen.intersection(self._syntax.arguments_keys):
            self._ready = "{}"
        self.state = State.DONE
        return True


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


#: For each tool and parameter, whether it is text or not, as far as the tools' schemas say so.
Texts = Mapping[str, Mapping[str, bool]]

_MAX_NAME = 200
_NO_NAME = re.compile(r"[\s<>{}()\[\]\"'`]")
_COUNTER = re.compile(r":[0-9]+$")


#: The first half of a surrogate pair, written as an escape.
_HALF = re.compile(r"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}$")
_SURROGATE = re.compile("[\ud800-\udfff]")


class _Complete(Exception):  # noqa: N818 - it says that no more steps follow
    """The call has ended early."""


class CallReader:
    """Reads one call.

    `name` is set as soon as it is known; from then on `take` gives the arguments as they come.
    Or else it turns out to be content, and `is_content` is set; then `take` gives that.
    """

    def __init__(self, steps: tuple[Step, ...], texts: Texts) -> None:
        self.state = State.OPEN
        self.is_content = False
        self._cursor = Cursor()
        self._texts = texts
        self._run = self._steps(steps)

    @property
    def name(self) -> str | None:
        """The name of the function, once it is known."""
        return self._cursor.name

    @property
    def unread(self) -> str:
        """What has been read, but is in neither `name` nor what `take` gave."""
        return self._cursor.loose

    def take(self) -> str:
        """Give the arguments that have come since the last time."""
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
            case Text(text):
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
                return ParameterReader(cursor, step, self._texts.get(self.name or "", {})).read()
            case Literals():
                return LiteralReader(cursor, step).read()
            case Elements():
                return ElementReader(cursor, step, self._texts.get(self.name or "", {})).read()
            case JsonContent():
                return self._said()
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
        while (place := first_of(cursor.rest, step.until)[0]) < 0:
            if len(cursor.rest) - held_back(cursor.rest, step.until) > _MAX_NAME:
                raise Refused
            yield
        if place > _MAX_NAME:
            raise Refused
        cursor.skip(place)

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
        yield from self._cursor.string()
        self._cursor.give_name(self._cursor.value)

    def _json_arguments(self) -> Iterator[None]:
        cursor = self._cursor
        yield from cursor.space()
        if cursor.text[cursor.at] != "{":
            cursor.give("{}")
            return
        scanner = JsonScanner()
        while scanner.state is State.OPEN:
            cursor.skip(scanner.feed(cursor.text, cursor.at) - cursor.at)
            cursor.give(scanner.take())
            cursor.loose = scanner.pending
            if scanner.state is State.OPEN:
                if cursor.final:
                    cursor.give(scanner.pending)
                yield
        if scanner.state is State.FAILED:
            raise Refused

    def _said(self) -> Iterator[None]:
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
        cursor = self._cursor
        reader = JsonCallReader(step)
        while True:
            cursor.skip(reader.feed(cursor.text, cursor.at) - cursor.at)
            if reader.name is not None:
                if cursor.name is None:
                    cursor.give_name(reader.name)
                cursor.give(reader.take())
                cursor.loose = reader.unread
            if reader.state is State.FAILED:
                raise Refused
            if reader.state is State.DONE:
                return
            if cursor.final and cursor.name is not None:
                cursor.give(reader.cut_off())
            yield


def _unescaped(text: str) -> str:
    """Read a part of the inside of a JSON string. Halves of surrogate pairs cannot be sent on."""
    value: str = json.loads(f'"{text}"')
    return value if is_text(value) else _SURROGATE.sub("\N{REPLACEMENT CHARACTER}", value)
