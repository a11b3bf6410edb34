"""Reads arguments written as literals of Python, or alike, and gives them as JSON."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterator
from typing import Final

from trioserve.chat.formats.syntax import Literals
from trioserve.chat.json_scanner import MAX_DEPTH
from trioserve.chat.parse.cursor import Cursor, Refused, held_back, json_characters

_WORDS: Final = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_KEY_END = re.compile(r"[^\w.-]")
_WORD_END = re.compile(r"[^-+.\w]")
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "\n": ""}
_HEX_LENGTHS = {"x": 2, "u": 4, "U": 8}
_MAX_WORD = 400


class LiteralReader:
    """Reads one pair of parentheses with its arguments."""

    def __init__(self, cursor: Cursor, syntax: Literals) -> None:
        self._cursor = cursor
        self._syntax = syntax

    def read(self) -> Iterator[None]:
        """Read all arguments."""
        yield from self._cursor.one_of((self._syntax.open,))
        yield from self._members(self._syntax.close, self._syntax.equals, 0)

    def _members(self, close: str, equals: str, depth: int) -> Iterator[None]:
        cursor = self._cursor
        cursor.give("{")
        count = 0
        while True:
            yield from cursor.space()
            if cursor.text[cursor.at] == close:
                break
            if count:
                yield from cursor.one_of((",",))
                yield from cursor.space()
                if cursor.text[cursor.at] == close:
                    break
                cursor.give(", ")
            yield from self._key(equals)
            yield from self._value(depth + 1)
            count += 1
        cursor.skip(1)
        cursor.give("}")

    def _items(self, depth: int) -> Iterator[None]:
        cursor = self._cursor
        cursor.give("[")
        count = 0
        while True:
            yield from cursor.space()
            if cursor.text[cursor.at] == "]":
                break
            if count:
                yield from cursor.one_of((",",))
                yield from cursor.space()
                if cursor.text[cursor.at] == "]":
                    break
                cursor.give(", ")
            yield from self._value(depth + 1)
            count += 1
        cursor.skip(1)
        cursor.give("]")

    def _key(self, equals: str) -> Iterator[None]:
        cursor = self._cursor
        quote = yield from self._quote()
        if quote:
            yield from self._string(quote)
            yield from cursor.one_of((equals,))
            cursor.give(": ")
            return
        while (found := _KEY_END.search(cursor.rest)) is None:
            if len(cursor.rest) > _MAX_WORD:
                raise Refused
            yield
        key = cursor.rest[: found.start()]
        if not key or len(key) > _MAX_WORD:
            raise Refused
        cursor.skip(len(key))
        cursor.give(f'"{key}": ')
        yield from cursor.one_of((equals,))

    def _quote(self) -> Generator[None, None, str]:
        """Find the quote that comes, which is not read; empty if there is none."""
        yield from self._cursor.character()
        while (found := self._cursor.find(self._syntax.quotes)) is None:
            yield
        return self._syntax.quotes[found] if found >= 0 else ""

    def _value(self, depth: int) -> Iterator[None]:
        if depth > MAX_DEPTH // 2:
            raise Refused
        cursor = self._cursor
        yield from cursor.space()
        first = cursor.text[cursor.at]
        if first == "{":
            cursor.skip(1)
            yield from self._members("}", ":", depth)
        elif first == "[":
            cursor.skip(1)
            yield from self._items(depth)
        elif quote := (yield from self._quote()):
            yield from self._string(quote)
        else:
            yield from self._word()

    def _word(self) -> Iterator[None]:
        cursor = self._cursor
        while (found := _WORD_END.search(cursor.rest)) is None:
            if len(cursor.rest) > _MAX_WORD:
                raise Refused
            yield
        word = cursor.rest[: found.start()]
        if len(word) > _MAX_WORD:
            raise Refused
        if word not in _WORDS and not _NUMBER.fullmatch(word):
            raise Refused
        cursor.skip(len(word))
        cursor.give(_WORDS.get(word, word))

    def _string(self, quote: str) -> Iterator[None]:
        cursor = self._cursor
        cursor.skip(len(quote))
        cursor.give('"')
        stops = (quote, "\\") if self._syntax.escapes else (quote,)
        while True:
            rest = cursor.rest
            places = [place for stop in stops if (place := rest.find(stop)) >= 0]
            run = min(places) if places else len(rest)
            if not places and not cursor.final:
                run -= held_back(rest, stops)
            if run:
                cursor.give(json_characters(cursor.skip(run)))
            if not places:
                yield
            elif cursor.rest.startswith(quote):
                cursor.skip(len(quote))
                cursor.give('"')
                return
            else:
                yield from self._escape()

    def _escape(self) -> Iterator[None]:
        """Read an escape. One that Python does not know stands for itself."""
        cursor = self._cursor
        while len(cursor.rest) < 2:
            yield
        kind = cursor.rest[1]
        if kind not in _HEX_LENGTHS:
            escape = cursor.skip(2)
            plain = kind if kind in "\\'\"/" else _ESCAPES.get(kind, escape)
            cursor.give(json_characters(plain))
            return
        length = _HEX_LENGTHS[kind]
        while len(cursor.rest) < 2 + length:
            if not re.fullmatch(r"[0-9a-fA-F]*", cursor.rest[2:]):
                raise Refused
            yield
        digits = cursor.rest[2 : 2 + length]
        if not re.fullmatch(r"[0-9a-fA-F]+", digits) or int(digits, 16) > 0x10FFFF:
            raise Refused
        cursor.skip(2 + length)
        code = int(digits, 16)
        if 0xD800 <= code < 0xE000:  # half of a pair, which JSON writes alike
            cursor.give(f"\\u{code:04x}")
        else:
            cursor.give(json_characters(chr(code)))
