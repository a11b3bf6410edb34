"""Reads a tool call that is one JSON object, as its text comes."""

from __future__ import annotations

import enum
import json

from trioserve.chat.formats.syntax import JsonCall
from trioserve.chat.json_scanner import WHITESPACE, JsonScanner, State
from trioserve.chat.parse.cursor import is_text


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
