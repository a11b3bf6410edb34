"""A scanner that finds the end of a JSON value in text that comes piece by piece.

It checks the grammar character by character and keeps no values, so it can say where a value
ends, or where it goes wrong, without waiting for more text than it needs.
jiter, which reads partial JSON, does not say where a value ends: it ignores what comes after it.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Generator, Iterator

WHITESPACE = " \t\n\r"

_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_NUMBER_CHARACTERS = frozenset("+-.0123456789eE")
_LITERALS = {"t": "true", "f": "false", "n": "null"}
_STRING_RUN = re.compile(r'[^"\\\x00-\x1f]+')
_HEX = frozenset("0123456789abcdefABCDEF")

#: Values nested deeper than this are refused: most readers of JSON could not take them.
MAX_DEPTH = 200


class State(enum.Enum):
    """The state of a scanner."""

    OPEN = enum.auto()  # the value is not complete
    DONE = enum.auto()
    FAILED = enum.auto()  # the last character cannot be part of a JSON value


class _InvalidError(Exception):
    """The next character cannot be part of the value."""


class JsonScanner:
    """Reads one JSON value, by generators that yield when they need more text.

    Control characters inside strings, which models write and JSON forbids, are taken and written
    as escapes to `text`.

    Attributes:
        state: of the value.
        pending: the part of an escape that has been read, and is not in `text` yet.
    """

    def __init__(self) -> None:
        self.state = State.OPEN
        self.pending = ""
        self._text, self._at = "", 0
        self._is_final = False
        self._in_string = False
        self._parts: list[str] = []
        self._taken = 0  # parts that `take` has given
        self._reading = self._value(0)

    @property
    def text(self) -> str:
        """The text that has been read."""
        return "".join(self._parts)

    @property
    def in_string(self) -> bool:
        """True while the next character is in a string."""
        return self._in_string and self.state is State.OPEN

    def take(self) -> str:
        """Return the text read since the last call."""
        fresh = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
        return fresh

    def feed(self, text: str, at: int = 0) -> int:
        """Read on, from `at`, and give the place of the first character that was not read.

        While the state is open that is the end of the text. Later it is the first character after
        the value, or the one that cannot be part of it.
        """
        if self.state is not State.OPEN:
            return at
        self._text, self._at = text, at
        try:
            next(self._reading)
        except StopIteration:
            self.state = State.DONE
        except _InvalidError:
            self.state = State.FAILED
        return self._at

    def finish(self) -> None:
        """End the text, which may complete a number."""
        self._is_final = True
        self.feed("")
        if self.state is State.OPEN:
            self.state = State.FAILED

    def _keep(self, text: str) -> None:
        self._parts.append(text)
        self._at += len(text)

    def _next(self, *, skips: bool = False) -> Generator[None, None, str]:
        """Wait for the next character, perhaps after whitespace, without reading it."""
        while True:
            while self._at == len(self._text):
                yield
            character = self._text[self._at]
            if not skips or character not in WHITESPACE:
                return character
            self._keep(character)

    def _expect(self, characters: str, *, skips: bool = False) -> Generator[None, None, str]:
        """Read one of the characters."""
        character = yield from self._next(skips=skips)
        if character not in characters:
            raise _InvalidError
        self._keep(character)
        return character

    def _value(self, depth: int) -> Iterator[None]:
        first = yield from self._next(skips=True)
        if first == '"':
            yield from self._string()
        elif first in "[{" and depth < MAX_DEPTH:
            yield from self._container("]" if first == "[" else "}", depth)
        elif first in _LITERALS:
            for letter in _LITERALS[first]:
                yield from self._expect(letter)
        elif first in "-0123456789":
            yield from self._number()
        else:
            raise _InvalidError

    def _container(self, close: str, depth: int) -> Iterator[None]:
        yield from self._expect("[{")
        if (yield from self._next(skips=True)) == close:
            self._keep(close)
            return
        end = ","
        while end == ",":
            if close == "}":
                yield from self._string()
                yield from self._expect(":", skips=True)
            yield from self._value(depth + 1)
            end = yield from self._expect(f",{close}", skips=True)

    def _number(self) -> Iterator[None]:
        word = ""
        while True:
            while self._at == len(self._text) and not self._is_final:
                yield
            character = self._text[self._at : self._at + 1]
            if character not in _NUMBER_CHARACTERS:
                break
            word += character
            self._keep(character)
        if not _NUMBER.fullmatch(word):
            raise _InvalidError

    def _string(self) -> Iterator[None]:
        yield from self._expect('"', skips=True)
        self._in_string = True
        while True:
            character = yield from self._next()
            if (run := _STRING_RUN.match(self._text, self._at)) is not None:
                self._keep(run[0])
            elif character == '"':
                break
            elif character == "\\":
                yield from self._escape()
            else:
                self._parts.append(f"\\u{ord(character):04x}")
                self._at += 1
        self._keep('"')
        self._in_string = False

    def _escape(self) -> Iterator[None]:
        self.pending = "\\"
        self._at += 1
        for characters in ('"\\/bfnrtu', _HEX, _HEX, _HEX, _HEX):
            character = yield from self._next()
            if character not in characters:
                raise _InvalidError
            self.pending += character
            self._at += 1
            if self.pending[1] != "u":
                break
        self._parts.append(self.pending)
        self.pending = ""


#: The beginnings of JSON values other than strings, and of Python's names for some.
JSON_BEGINNINGS = frozenset("{[-0123456789tfnTFN")
_WORDS = {"True": "true", "False": "false", "None": "null"}


def as_json(text: str) -> str:
    """Write a value as JSON: as it is, if it is JSON, and else as a string."""
    bare = text.strip(WHITESPACE)
    if bare in _WORDS:
        return _WORDS[bare]
    if bare and bare[0] in JSON_BEGINNINGS and _is_json(bare):
        return bare
    return json.dumps(text, ensure_ascii=False)


def _is_json(text: str) -> bool:
    scanner = JsonScanner()
    end = scanner.feed(text)
    scanner.finish()
    # The scanner writes control characters as escapes: then the text as it is would be no JSON.
    return scanner.state is State.DONE and end == len(text) and scanner.text == text
