"""Reads arguments that are not one JSON object, and gives them as JSON."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterator
from typing import Final

from trioserve.chat.formats.syntax import Elements, Literals, Parameters
from trioserve.chat.grammar.kinds import ANY, TEXT, Shape, begins_text, read_bare
from trioserve.chat.json_scanner import MAX_DEPTH, WHITESPACE, JsonScanner
from trioserve.chat.parse.cursor import Cursor, Refused, is_text, json_characters

_WORDS: Final = {
    "True": "true",
    "False": "false",
    "None": "null",
    "true": "true",
    "false": "false",
    "null": "null",
}
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
#: The end of a key. Keys such as ``$match`` are for notations whose strings have no escapes.
_KEY_END = re.compile(r"[^\w.-]")
_PLAIN_KEY_END = re.compile(r"[^\w.$@*+/-]")
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
        yield from self._cursor.one_of((self._syntax.open,))
        yield from self._members(self._syntax.close, self._syntax.equals, 0)

    def read_value(self) -> Iterator[None]:
        return self._value(0)

    def _list(
        self, brackets: str, close: str, item: Callable[[], Iterator[None]]
    ) -> Iterator[None]:
        """Read items up to the end of their list. A comma may stand behind the last one."""
        cursor = self._cursor
        cursor.give(brackets[0])
        count = 0
        while True:
            yield from cursor.space()
            if count and cursor.text[cursor.at] != close:
                yield from cursor.one_of((",",))
                yield from cursor.space()
            if cursor.text[cursor.at] == close:
                break
            cursor.give(", " if count else "")
            yield from item()
            count += 1
        cursor.skip(1)
        cursor.give(brackets[1])

    def _members(self, close: str, equals: str, depth: int) -> Iterator[None]:
        def member() -> Iterator[None]:
            yield from self._key(equals)
            yield from self._value(depth + 1)

        return self._list("{}", close, member)

    def _key(self, equals: str) -> Iterator[None]:
        cursor = self._cursor
        quote = yield from self._quote()
        if quote:
            yield from self._string(quote)
            yield from cursor.one_of((equals,))
            cursor.give(": ")
            return
        key = yield from self._word(_KEY_END if self._syntax.escapes else _PLAIN_KEY_END)
        if not key:
            raise Refused
        cursor.skip(len(key))
        cursor.give(f'"{key}": ')
        yield from cursor.one_of((equals,))

    def _quote(self) -> Generator[None, None, str]:
        """Find the quote that comes, without reading it; empty if something else comes."""
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
            yield from self._list("[]", "]", lambda: self._value(depth + 1))
        elif quote := (yield from self._quote()):
            yield from self._string(quote)
        else:
            word = yield from self._word(_WORD_END)
            if word not in _WORDS and not _NUMBER.fullmatch(word):
                raise Refused
            cursor.skip(len(word))
            cursor.give(_WORDS.get(word, word))

    def _word(self, end: re.Pattern[str]) -> Generator[None, None, str]:
        """Wait for the end of a word, and give the word, which is not read."""
        cursor = self._cursor
        while (found := end.search(cursor.rest)) is None:
            if len(cursor.rest) > _MAX_WORD:
                raise Refused
            yield
        if found.start() > _MAX_WORD:
            raise Refused
        return cursor.rest[: found.start()]

    def _string(self, quote: str) -> Iterator[None]:
        cursor = self._cursor
        cursor.skip(len(quote))
        cursor.give('"')
        stops = (quote, "\\") if self._syntax.escapes else (quote,)
        while True:
            text, stop = cursor.before(stops)
            cursor.give(json_characters(text))
            if not stop:
                yield
            elif stop == quote:
                cursor.skip(len(quote))
                cursor.give('"')
                return
            else:
                yield from self._escape()

    def _escape(self) -> Iterator[None]:
        """Read an escape. One that Python does not have stands for itself."""
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


#: The longest value that is read as Python: it takes the square of its length.
_MAX_PYTHON = 2**15
_PYTHON = Literals(open="(", equals="=", close=")")
_MAX_KEY = 400
_CDATA = "<![CDATA["


class ParameterReader:
    """Reads all the parameters of a call, whose arguments have a shape."""

    def __init__(self, cursor: Cursor, syntax: Parameters, shape: Shape) -> None:
        self._cursor = cursor
        self._syntax = syntax
        self._shape = shape

    def read(self) -> Iterator[None]:
        """Read the parameters, but not the text after the last one."""
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
        kinds = self._shape.member(key).kinds
        if syntax.text_attribute:
            kinds = TEXT if syntax.text_attribute in attributes else ANY - TEXT
        if syntax.is_json:
            kinds = ANY - TEXT
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
            kinds = TEXT
        elif "string" in kinds and kinds != TEXT:
            kinds = yield from _narrowed(cursor, kinds)
        yield from self._value(f"]]>{syntax.close}" if quoted else syntax.close, kinds)

    def _until(self, marker: str) -> Generator[None, None, str]:
        text = yield from self._cursor.until((marker,), _MAX_KEY)
        self._cursor.skip(len(text + marker))
        return text

    def _value(self, close: str, kinds: frozenset[str]) -> Iterator[None]:
        """Read a value and its end. Text is given as it comes, and JSON at the end."""
        cursor, syntax = self._cursor, self._syntax
        streams, is_json = kinds == TEXT, "string" not in kinds
        ends = (f"\n{close}", close) if syntax.newlines else (close,)
        scanner = JsonScanner()
        value = ""

        def take(read: str) -> None:
            nonlocal value
            if not streams:
                value += read
                scanner.feed(read)
            elif read:
                cursor.give(json_characters(read))

        if streams:
            cursor.give('"')
        while True:
            text, end = cursor.before(ends)
            take(text)
            if not end:
                if cursor.final and not streams:
                    cursor.give(value)
                yield
                continue
            verdict = False if is_json and scanner.in_string else self._follows(len(end))
            if verdict is False:
                take(cursor.skip(len(end)))
            elif verdict or cursor.final:
                cursor.skip(len(end) if verdict else len(cursor.rest))
                break
            else:
                yield
        if syntax.is_json and value.lstrip().startswith('"'):
            cursor.give(_text_as_json(value))
        else:
            cursor.give('"' if streams else _bare(value, kinds))

    def _follows(self, length: int) -> bool | None:
        """Check that the text after an end marker confirms it; None while that is open."""
        after = self._cursor.rest[length:].lstrip(WHITESPACE)
        texts = (self._syntax.open, *self._syntax.ends)
        if any(after.startswith(text) for text in texts):
            return True
        return None if any(text.startswith(after) for text in texts) else False


def _text_as_json(text: str) -> str:
    """Write text that is a JSON string as one; any other is written as it is."""
    try:
        value = json.loads(text, strict=False)
    except ValueError:
        value = text
    value = value if isinstance(value, str) else text
    return json.dumps(value, ensure_ascii=not is_text(value))


def _bare(text: str, kinds: frozenset[str]) -> str:
    """Read a bare value as JSON; one that can be no text may be written as in Python."""
    given = read_bare(text, kinds)
    if "string" in kinds or not given.startswith('"') or text.lstrip()[:1] not in ("[", "{"):
        return given
    if len(text) > _MAX_PYTHON:
        return given
    cursor = Cursor()
    cursor.text, cursor.final = text, True
    try:
        is_complete = next(LiteralReader(cursor, _PYTHON).read_value(), "") == ""
    except Refused:
        return given
    return cursor.taken() if is_complete and not cursor.rest.strip(WHITESPACE) else given


def _narrowed(cursor: Cursor, kinds: frozenset[str]) -> Generator[None, None, frozenset[str]]:
    """Leave nothing but text of the kinds of a value, if its first character shows that."""
    yield from cursor.character()
    return TEXT if begins_text(cursor.text[cursor.at], kinds) else kinds


_MAX_TAG = 400


class ElementReader:
    """Reads all the arguments of a call, and the end of the element around them."""

    def __init__(self, cursor: Cursor, syntax: Elements, shape: Shape) -> None:
        self._cursor = cursor
        self._syntax = syntax
        self._shape = shape

    def read(self) -> Iterator[None]:
        self._cursor.give("{")
        first = yield from self._tag(self._syntax.parent)
        yield from self._children("{}", self._syntax.parent, first, self._shape, 0)

    def _children(
        self, brackets: str, parent: str, tag: str, shape: Shape, depth: int
    ) -> Iterator[None]:
        """Read children whose first tag has been read, up to the end of their parent."""
        cursor = self._cursor
        comma = ""
        while tag:
            key = f"{json.dumps(tag, ensure_ascii=False)}: " if brackets == "{}" else ""
            if not key and tag != self._syntax.item:
                raise Refused
            cursor.give(comma + key)
            yield from self._value(tag, shape.member(tag) if key else shape.item(), depth + 1)
            tag = yield from self._tag(parent)
            comma = ", "
        cursor.give(brackets[1])

    def _tag(self, parent: str) -> Generator[None, None, str]:
        """Read a tag and give its name, which is empty for the end of the parent."""
        cursor = self._cursor
        yield from cursor.one_of((f"{self._syntax.mark}<",))
        tag = yield from cursor.until((">",), _MAX_TAG)
        is_end = tag == f"/{parent}"
        if not is_end and (not tag or tag.startswith("/")):
            raise Refused
        cursor.skip(len(tag) + 1)
        return "" if is_end else tag

    def _value(self, tag: str, shape: Shape, depth: int) -> Iterator[None]:
        """Read the content of an element, and its end."""
        if depth > MAX_DEPTH // 2:
            raise Refused
        nested = (yield from self._is_nested()) if shape.nests else False
        if not nested:
            yield from self._leaf(f"{self._syntax.mark}</{tag}>", shape.kinds)
            return
        child = yield from self._tag(tag)
        brackets = "[]" if child == self._syntax.item else "{}"
        self._cursor.give(brackets[0])
        yield from self._children(brackets, tag, child, shape, depth)

    def _is_nested(self) -> Generator[None, None, bool]:
        """Look for a first element after whitespace: there are others within this one."""
        cursor = self._cursor
        tag = f"{self._syntax.mark}<"
        while True:
            rest = cursor.rest.lstrip(WHITESPACE)
            if rest.startswith(tag) and len(rest) > len(tag):
                return rest[len(tag)] != "/"
            if not tag.startswith(rest[: len(tag)]):
                return False
            yield

    def _leaf(self, end: str, kinds: frozenset[str]) -> Iterator[None]:
        """Read content without elements: text as it arrives, or else JSON at the end."""
        cursor = self._cursor
        if "string" in kinds and kinds != TEXT:
            kinds = yield from _narrowed(cursor, kinds)
        is_text = kinds == TEXT
        value = ""
        cursor.give('"' if is_text else "")
        while True:
            read, ended = cursor.before((end,))
            value += read
            if is_text:
                cursor.give(json_characters(read))
            if ended:
                break
            if cursor.final and not is_text:
                cursor.give(value)
            yield
        cursor.skip(len(end))
        cursor.give('"' if is_text else read_bare(value, kinds))
