"""Reads arguments written as elements of XML, one in another, and gives them as JSON."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping

from trioserve.chat.formats.syntax import Elements
from trioserve.chat.formats.values import as_json
from trioserve.chat.json_scanner import MAX_DEPTH, WHITESPACE
from trioserve.chat.parse.cursor import Cursor, Refused, held_back, json_characters

_MAX_TAG = 400


class ElementReader:
    """Reads all the arguments of a call, and the end of the element around them.

    Args:
        cursor: where the text is.
        syntax: the markers.
        texts: for each argument whether it is text or not, as far as the tool's schema says so.
    """

    def __init__(self, cursor: Cursor, syntax: Elements, texts: Mapping[str, bool]) -> None:
        self._cursor = cursor
        self._syntax = syntax
        self._texts = texts

    def read(self) -> Iterator[None]:
        """Read the arguments."""
        cursor = self._cursor
        cursor.give("{")
        first = yield from self._tag(self._syntax.parent)
        yield from self._members(self._syntax.parent, first, self._texts, 0)

    def _members(
        self, parent: str, tag: str, texts: Mapping[str, bool], depth: int
    ) -> Iterator[None]:
        """Read children whose first tag has been read, up to the end of their parent."""
        cursor = self._cursor
        comma = ""
        while tag:
            cursor.give(f"{comma}{json.dumps(tag, ensure_ascii=False)}: ")
            yield from self._value(tag, texts.get(tag), depth + 1)
            tag = yield from self._tag(parent)
            comma = ", "
        cursor.give("}")

    def _items(self, parent: str, tag: str, depth: int) -> Iterator[None]:
        cursor = self._cursor
        comma = ""
        while tag:
            if tag != self._syntax.item:
                raise Refused
            cursor.give(comma)
            yield from self._value(tag, None, depth + 1)
            tag = yield from self._tag(parent)
            comma = ", "
        cursor.give("]")

    def _tag(self, parent: str) -> Generator[None, None, str]:
        """Read a tag and give its name, which is empty for the end of the parent."""
        cursor = self._cursor
        yield from cursor.one_of((f"{self._syntax.mark}<",))
        while (place := cursor.rest.find(">")) < 0:
            if len(cursor.rest) > _MAX_TAG:
                raise Refused
            yield
        tag = cursor.rest[:place]
        if tag == f"/{parent}":
            cursor.skip(place + 1)
            return ""
        if not tag or tag.startswith("/") or place > _MAX_TAG:
            raise Refused
        cursor.skip(place + 1)
        return tag

    def _value(self, tag: str, is_text: bool | None, depth: int) -> Iterator[None]:
        """Read what an element holds, and its end."""
        if depth > MAX_DEPTH // 2:
            raise Refused
        cursor, mark = self._cursor, self._syntax.mark
        if is_text:
            cursor.give('"')
            yield from self._text(f"{mark}</{tag}>")
            cursor.give('"')
            return
        nested = yield from self._is_nested()
        if not nested:
            yield from self._leaf(f"{mark}</{tag}>")
            return
        child = yield from self._tag(tag)
        if child == self._syntax.item:
            cursor.give("[")
            yield from self._items(tag, child, depth)
        else:
            cursor.give("{")
            yield from self._members(tag, child, {}, depth)

    def _is_nested(self) -> Generator[None, None, bool]:
        """Whether an element holds others: then the first one comes, after whitespace."""
        cursor = self._cursor
        tag = f"{self._syntax.mark}<"
        while True:
            rest = cursor.rest.lstrip(WHITESPACE)
            if rest.startswith(tag) and len(rest) > len(tag):
                return rest[len(tag)] != "/"
            if not tag.startswith(rest[: len(tag)]):
                return False
            yield

    def _text(self, end: str) -> Iterator[None]:
        cursor = self._cursor
        while (place := cursor.rest.find(end)) < 0:
            held = 0 if cursor.final else held_back(cursor.rest, (end,))
            cursor.give(json_characters(cursor.skip(len(cursor.rest) - held)))
            yield
        cursor.give(json_characters(cursor.skip(place)))
        cursor.skip(len(end))

    def _leaf(self, end: str) -> Iterator[None]:
        cursor = self._cursor
        value = ""
        while (place := cursor.rest.find(end)) < 0:
            held = 0 if cursor.final else held_back(cursor.rest, (end,))
            value += cursor.skip(len(cursor.rest) - held)
            if cursor.final:
                cursor.give(value)
            yield
        value += cursor.skip(place)
        cursor.skip(len(end))
        cursor.give(as_json(value))
