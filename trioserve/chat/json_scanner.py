"""A scanner that finds the end of a JSON value in text that comes piece by piece.

It checks the grammar character by character and keeps no values, so it can say where a value
ends, or where it goes wrong, without waiting for more text than it needs.
jiter, which reads partial JSON, does not say where a value ends: it ignores what comes after it.
"""

from __future__ import annotations

import enum
import json
import re

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


class _Expect(enum.Enum):
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()  # after "["
    KEY = enum.auto()
    KEY_OR_END = enum.auto()  # after "{"
    COLON = enum.auto()
    COMMA_OR_END = enum.auto()


class JsonScanner:
    """Reads one JSON value. `text` is the part that has been read.

    Control characters inside strings, which models write and JSON forbids, are taken and written
    as escapes to `text`.
    """

    def __init__(self) -> None:
        self.state = State.OPEN
        self._parts: list[str] = []
        self._taken = 0  # how much of the text `take` has given
        self._expect = _Expect.VALUE
        self._stack: list[str] = []
        self._in_string = False
        self._escape = ""  # the part of an escape so far, with the backslash
        self._word = ""  # the part of a number or literal so far

    @property
    def text(self) -> str:
        return "".join(self._parts)

    @property
    def in_string(self) -> bool:
        """True while the next character is in a string."""
        return self._in_string and self.state is State.OPEN

    def take(self) -> str:
        fresh = "".join(self._parts[self._taken :])
        self._taken = len(self._parts)
        return fresh

    def feed(self, text: str, at: int = 0) -> int:
        """Read on, from `at`, and give the place of the first character that was not read.

        While the state is open that is the end of the text. Later it is the first character after
        the value, or the one that cannot be part of it.
        """
        while at < len(text) and self.state is State.OPEN:
            if self._in_string:
                at = self._read_string(text, at)
            elif self._word:
                at = self._read_word(text, at)
            elif text[at] in WHITESPACE or self._accept(text[at]):
                self._parts.append(text[at])
                at += 1
            else:
                self.state = State.FAILED
        return at

    def finish(self) -> None:
        """End the text, which may complete a number."""
        if self.state is State.OPEN and self._word:
            self._end_word()
        if self.state is State.OPEN:
            self.state = State.FAILED

    def _read_string(self, text: str, at: int) -> int:
        if self._escape:
            return self._read_escape(text, at)
        run = _STRING_RUN.match(text, at)
        if run is not None:
            self._parts.append(run.group())
            return run.end()
        character = text[at]
        if character == "\\":
            self._escape = character
        elif character == '"':
            self._parts.append(character)
            self._in_string = False
            if self._stack and self._expect in (_Expect.KEY, _Expect.KEY_OR_END):
                self._expect = _Expect.COLON
            else:
                self._end_value()
        else:
            self._parts.append(f"\\u{ord(character):04x}")
        return at + 1

    def _read_escape(self, text: str, at: int) -> int:
        """Read one character of an escape. It gets into the text when it is complete."""
        character = text[at]
        if len(self._escape) == 1:
            fits = character in '"\\/bfnrtu'
            complete = character != "u"
        else:
            fits = character in _HEX
            complete = len(self._escape) == 5
        if not fits:
            self.state = State.FAILED
            return at
        self._escape += character
        if complete:
            self._parts.append(self._escape)
            self._escape = ""
        return at + 1

    @property
    def pending(self) -> str:
        """The part of an escape that has been read, and is not in the text yet."""
        return self._escape

    def _read_word(self, text: str, at: int) -> int:
        character = text[at]
        literal = _LITERALS.get(self._word[0])
        if literal is not None:
            if literal[len(self._word)] != character:
                self.state = State.FAILED
                return at
        elif character not in _NUMBER_CHARACTERS:
            self._end_word()
            return at
        self._word += character
        self._parts.append(character)
        if self._word == literal:
            self._end_word()
        return at + 1

    def _end_word(self) -> None:
        word, self._word = self._word, ""
        if word not in _LITERALS.values() and not _NUMBER.fullmatch(word):
            self.state = State.FAILED
        else:
            self._end_value()

    def _accept(self, character: str) -> bool:
        """Take a character outside of strings and words, if it may come."""
        expect = self._expect
        if character in "]}":
            may_end = (_Expect.VALUE_OR_END, _Expect.KEY_OR_END, _Expect.COMMA_OR_END)
            if expect not in may_end or self._stack.pop() != {"]": "[", "}": "{"}[character]:
                return False
            self._end_value()
            return True
        if expect in (_Expect.VALUE, _Expect.VALUE_OR_END):
            return self._begin_value(character)
        if expect in (_Expect.KEY, _Expect.KEY_OR_END):
            self._in_string = character == '"'
            return self._in_string
        if expect is _Expect.COLON:
            self._expect = _Expect.VALUE
            return character == ":"
        self._expect = _Expect.KEY if self._stack[-1] == "{" else _Expect.VALUE
        return character == ","

    def _begin_value(self, character: str) -> bool:
        if character in "[{":
            self._stack.append(character)
            self._expect = _Expect.VALUE_OR_END if character == "[" else _Expect.KEY_OR_END
            return len(self._stack) <= MAX_DEPTH
        if character == '"':
            self._in_string = True
            return True
        if character in _LITERALS or character == "-" or character in "0123456789":
            self._word = character
            return True
        return False

    def _end_value(self) -> None:
        self._expect = _Expect.COMMA_OR_END
        if not self._stack:
            self.state = State.DONE


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
