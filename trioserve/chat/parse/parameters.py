"""Reads arguments that stand one by one between markers, and gives them as a JSON object."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping

from trioserve.chat.formats.syntax import Parameters
from trioserve.chat.formats.values import JSON_BEGINNINGS, as_json
from trioserve.chat.json_scanner import WHITESPACE, JsonScanner
from trioserve.chat.parse.cursor import Cursor, Refused, held_back, json_characters

_MAX_KEY = 400
_CDATA = "<![CDATA["


class ParameterReader:
    """Reads all the parameters of a call.

    Args:
        cursor: where the text is.
        syntax: the markers.
        texts: for each parameter whether it is text or not, as far as the tool's schema says so.
    """

    def __init__(self, cursor: Cursor, syntax: Parameters, texts: Mapping[str, bool]) -> None:
        self._cursor = cursor
        self._syntax = syntax
        self._texts = texts

    def read(self) -> Iterator[None]:
        """Read the parameters; what follows the last one is left."""
        cursor, syntax = self._cursor, self._syntax
        cursor.give("{")
        count = 0
        while True:
            yield from cursor.space()
            while (found := cursor.find((syntax.open,))) is None:
                if cursor.final:
                    cursor.skip(len(cursor.rest))
                yield
            if found < 0:
                break
            cursor.skip(len(syntax.open))
            yield from self._parameter(", " if count else "")
            count += 1
        cursor.give("}")

    def _parameter(self, comma: str) -> Iterator[None]:
        cursor, syntax = self._cursor, self._syntax
        key = yield from self._until(syntax.key_end)
        cursor.give(f"{comma}{json.dumps(key, ensure_ascii=False)}: ")
        attributes = ""
        if syntax.value_open:
            attributes = yield from self._until(syntax.value_open)
            if attributes.strip(WHITESPACE) and not syntax.text_attribute:
                raise Refused
        is_text = self._texts.get(key)
        if syntax.text_attribute:
            is_text = syntax.text_attribute in attributes
        if syntax.newlines:
            yield from cursor.character()
            if cursor.text[cursor.at] == "\n":
                cursor.skip(1)
        quoted = False
        if syntax.cdata:
            yield from cursor.character()
            while (found := cursor.find((_CDATA,))) is None:
                yield
            quoted = found == 0
            cursor.skip(len(_CDATA) if quoted else 0)
        if quoted:
            is_text = True
        is_json = is_text is False
        if is_text is None:
            yield from cursor.character()
            # An empty value begins with its end marker, which JSON does not.
            is_text = cursor.text[cursor.at] not in JSON_BEGINNINGS
        close = f"]]>{syntax.close}" if quoted else syntax.close
        if is_text:
            cursor.give('"')
            yield from self._value(close, streams=True)
            cursor.give('"')
        else:
            yield from self._value(close, streams=False, is_json=is_json)

    def _until(self, marker: str) -> Generator[None, None, str]:
        """Read until a marker, and give what stands before it."""
        cursor = self._cursor
        while (place := cursor.rest.find(marker)) < 0:
            if len(cursor.rest) > _MAX_KEY + len(marker):
                raise Refused
            yield
        if place > _MAX_KEY:
            raise Refused
        text = cursor.skip(place)
        cursor.skip(len(marker))
        return text

    def _value(self, close: str, *, streams: bool, is_json: bool = False) -> Iterator[None]:
        """Read a value and its end; gives text as it comes, or else JSON at the end.

        What must be JSON does not end within a string.
        """
        cursor, syntax = self._cursor, self._syntax
        ends = (f"\n{close}", close) if syntax.newlines else (close,)
        value = ""
        scanner = JsonScanner()
        while True:
            place, length = self._end(ends)
            until = place
            if place < 0:
                until = len(cursor.rest) - (0 if cursor.final else held_back(cursor.rest, ends))
            if streams and until:
                cursor.give(json_characters(cursor.skip(until)))
            else:
                value += cursor.skip(until)
                scanner.feed(value[len(value) - until :])
            if place < 0:
                if cursor.final and not streams:
                    cursor.give(value)
                yield
                continue
            verdict = False if is_json and scanner.in_string else self._follows(length)
            if verdict is None:
                if cursor.final:
                    cursor.skip(len(cursor.rest))
                    break
                yield
            elif verdict:
                cursor.skip(length)
                break
            elif streams:
                cursor.give(json_characters(cursor.skip(length)))
            else:
                value += cursor.skip(length)
                scanner.feed(value[len(value) - length :])
        if not streams:
            cursor.give(as_json(value))

    def _end(self, ends: tuple[str, ...]) -> tuple[int, int]:
        """Find the first end marker: its place, or -1, and its length."""
        rest = self._cursor.rest
        places = [(place, len(end)) for end in ends if (place := rest.find(end)) >= 0]
        return min(places, default=(-1, 0))

    def _follows(self, length: int) -> bool | None:
        """Whether what comes after an end marker shows that it is one; None while that is open."""
        after = self._cursor.rest[length:].lstrip(WHITESPACE)
        texts = (self._syntax.open, *self._syntax.ends)
        if any(after.startswith(text) for text in texts):
            return True
        return None if any(text.startswith(after) for text in texts) else False
