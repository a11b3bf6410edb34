"""JSON that is long, read in steps: Python's own parser lets no other thread run until it is done.

Strings, and lists and objects up to `_STEP` characters, are still left to that parser, piece by
piece, so that it takes about as long as before.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from json.decoder import scanstring  # type: ignore[attr-defined]
from typing import Any, cast

from trioserve.api.base import limits
from trioserve.errors import InvalidRequestError

#: Characters that are parsed in one step: less than a millisecond.
_STEP = 32 * 1024

_BLANKS = re.compile(r"[ \t\n\r]*")
_PIECE = re.compile(rf'[^"\\]{{1,{_STEP}}}|(?:\\.[^"\\]{{0,8}}){{1,2048}}', re.DOTALL)

#: What a value in a list ends with, and the comma after it, by how the value before it begins.
_ENDS = {'"': '",', "{": "},", "[": "],"}
#: After so many values that had to be read alone, those of a list are not tried together again.
_MAX_ALONE = 64

_Scan = Callable[[str, int], tuple[Any, int]]


class LongReader:
    """Reads one JSON value of any length.

    Raises:
        InvalidRequestError: it has too many values, or is nested too deeply.
        ValueError: it is not JSON.
        RecursionError: it is nested too deeply.
    """

    def __init__(self, text: str, parse_constant: Callable[[str], Any]) -> None:
        self._text = text
        scanner = json.JSONDecoder(parse_constant=parse_constant)
        self._scan = cast(_Scan, scanner.scan_once)  # type: ignore[attr-defined]
        self._n_values = 0

    def read(self) -> Any:
        """Read the value that is all of the text."""
        value, end = self._value(self._skip(0), 0)
        if (end := self._skip(end)) != len(self._text):
            raise json.JSONDecodeError("Extra data", self._text, end)
        return value

    def _skip(self, at: int) -> int:
        return cast(re.Match[str], _BLANKS.match(self._text, at)).end()

    def _value(self, at: int, depth: int) -> tuple[Any, int]:
        kind = self._text[at : at + 1]
        if kind == '"':
            return self._string(at)
        if kind not in ("[", "{"):
            return self._scanned(at)
        for size in (_STEP // 32, _STEP):
            if at + size >= len(self._text):
                self._count(self._text.count(",", at))
                return self._scanned(at)
            try:
                value, length = self._scan(self._text[at : at + size], 0)
            except (json.JSONDecodeError, StopIteration):
                continue  # it is longer, or no JSON
            self._count(1 + self._text.count(",", at, at + length))
            return value, at + length
        if depth >= limits.MAX_DEPTH:
            raise RecursionError
        return self._list(at, depth + 1) if kind == "[" else self._object(at, depth + 1)

    def _scanned(self, at: int) -> tuple[Any, int]:
        try:
            return self._scan(self._text, at)
        except StopIteration as error:
            raise json.JSONDecodeError("Expecting value", self._text, error.value) from None

    def _list(self, at: int, depth: int) -> tuple[list[Any], int]:
        values: list[Any] = []
        n_alone = 0  # values since some were last read together
        at = self._skip(at + 1)
        if self._text[at : at + 1] == "]":
            return values, at + 1
        while True:
            if n_alone < _MAX_ALONE:
                before = at
                at = self._many(at, values)
                n_alone = n_alone + 1 if at == before else 0
            value, at = self._value(at, depth)
            values.append(value)
            self._count(1)
            at = self._skip(at)
            if self._text[at : at + 1] == "]":
                return values, at + 1
            at = self._skip(self._expect(",", at, "Expecting ',' delimiter"))

    def _object(self, at: int, depth: int) -> tuple[dict[str, Any], int]:
        values: dict[str, Any] = {}
        n_alone = 0
        at = self._skip(at + 1)
        if self._text[at : at + 1] == "}":
            return values, at + 1
        while True:
            if n_alone < _MAX_ALONE:
                before = at
                at = self._fields(at, values)
                n_alone = n_alone + 1 if at == before else 0
            if self._text[at : at + 1] != '"':
                message = "Expecting property name enclosed in double quotes"
                raise json.JSONDecodeError(message, self._text, at)
            name, at = self._string(at)
            at = self._skip(self._expect(":", self._skip(at), "Expecting ':' delimiter"))
            values[name], at = self._value(at, depth)
            self._count(1)
            at = self._skip(at)
            if self._text[at : at + 1] == "}":
                return values, at + 1
            at = self._skip(self._expect(",", at, "Expecting ',' delimiter"))

    def _many(self, at: int, values: list[Any]) -> int:
        """Read as many values of a list as one step takes, but not its last one.

        Returns where the next one begins. Values that parse up to a comma are what is there, so it
        does no harm that the comma is only likely to be one between values.
        """
        while True:
            some = self._text[at : at + _STEP]
            cut = some.rfind(_ENDS.get(some[:1], ",")) + (some[:1] in _ENDS)
            found = self._piece(some, cut, "[]")
            if found is None:
                return at
            values += found
            at = self._skip(at + cut + 1)

    def _fields(self, at: int, values: dict[str, Any]) -> int:
        """Do the same for an object."""
        while True:
            some = self._text[at : at + _STEP]
            cut = max(some.rfind(comma) for comma in (',"', ', "', ',\n"'))
            found = self._piece(some, cut, "{}")
            if found is None:
                return at
            values |= found
            at = self._skip(at + cut + 1)

    def _piece(self, some: str, cut: int, brackets: str) -> Any:
        """Read a part of a list or an object, as one of its own; None if it is not whole."""
        if cut < _STEP // 2:
            return None
        try:
            found, length = self._scan(f"{brackets[0]}{some[:cut]}{brackets[1]}", 0)
        except (json.JSONDecodeError, StopIteration):
            return None  # a value in it is longer, or it is no JSON, which is found again
        if length != cut + 2:
            return None
        self._count(some.count(",", 0, cut) + 1)
        return found

    def _string(self, at: int) -> tuple[str, int]:
        pieces: list[str] = []
        place = at + 1
        while (found := _PIECE.match(self._text, place)) is not None:
            try:
                piece, _ = scanstring(found[0] + '"', 0)
            except json.JSONDecodeError:
                break  # which is found again, with its place in the text
            if pieces and "\udc00" <= piece[:1] <= "\udfff" and pieces[-1][-1:] >= "\ud800":
                pair = (pieces[-1][-1] + piece[0]).encode("utf-16", "surrogatepass")
                pieces[-1] = pieces[-1][:-1] + pair.decode("utf-16", "surrogatepass")
                piece = piece[1:]
            pieces.append(piece)
            place = found.end()
        if self._text[place : place + 1] == '"':
            return "".join(pieces), place + 1
        text, end = scanstring(self._text, at + 1)
        return text, end

    def _expect(self, letter: str, at: int, message: str) -> int:
        if self._text[at : at + 1] != letter:
            raise json.JSONDecodeError(message, self._text, at)
        return at + 1

    def _count(self, n: int) -> None:
        self._n_values += n
        if self._n_values > limits.MAX_VALUES:
            raise InvalidRequestError(f"The body has more than {limits.MAX_VALUES} values.")


def check_json(value: Any) -> None:
    """Check what JSON may hold, but requests may not.

    Raises:
        RecursionError: it is nested too deeply.
        UnicodeError: a text has half of a surrogate pair.
    """
    level, depth = [value], 0
    while level:
        for text in _texts_of(level):
            text.encode()
        containers = [each for each in level if isinstance(each, list | dict)]
        if containers and depth == limits.MAX_DEPTH:
            raise RecursionError
        depth += 1
        level = [
            inner
            for each in containers
            for inner in (each.values() if isinstance(each, dict) else each)
            if isinstance(inner, str | list | dict)
        ]


def _texts_of(level: list[Any]) -> Iterator[str]:
    for each in level:
        if isinstance(each, str):
            yield each
        elif isinstance(each, dict):
            yield from each
