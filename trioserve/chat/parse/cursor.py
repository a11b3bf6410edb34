"""A place in text that comes piece by piece, for readers that are written as generators.

A generator reads on until it needs more text, and yields. It decides only what further text cannot
change, so that the result does not depend on the pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from typing import TypeAlias

from trioserve.chat.formats.syntax import beginning_of, first_of, held_back
from trioserve.chat.json_scanner import WHITESPACE, JsonScanner, State

Reading: TypeAlias = Iterator[None]

#: Half of a surrogate pair.
SURROGATE = re.compile("[\ud800-\udfff]")


class Refused(Exception):  # noqa: N818 - it describes the text, and is not an error
    """The text is not in the reader's format."""


class Cursor:
    """Reads text and gives arguments.

    `loose` is what has been read since the name, or arguments, were last given.
    """

    def __init__(self) -> None:
        self.text = ""
        self.at = 0
        self.final = False  # whether the text is complete
        self.name: str | None = None
        self.loose = ""
        self._given: list[str] = []

    # -- what has been read

    def give(self, arguments: str) -> None:
        self._given.append(arguments)
        self.loose = ""

    def give_name(self, name: str) -> None:
        """Set the name, which all text so far stands for."""
        if not name or not is_text(name):
            raise Refused
        self.name = name
        self.loose = ""

    def taken(self) -> str:
        given, self._given = "".join(self._given), []
        return given

    # -- reading

    @property
    def rest(self) -> str:
        return self.text[self.at :]

    def skip(self, count: int) -> str:
        """Read characters, and give them."""
        read = self.text[self.at : self.at + count]
        self.at += len(read)
        self.loose += read
        return read

    def character(self) -> Iterator[None]:
        while self.at == len(self.text):
            yield

    def space(self) -> Iterator[None]:
        """Read whitespace, and wait for the text after it."""
        yield from self.character()
        while self.text[self.at] in WHITESPACE:
            self.skip(1)
            yield from self.character()

    def find(self, texts: tuple[str, ...]) -> int | None:
        """Find which of the texts comes, without reading it; None while that is open.

        Gives the index of the text, or -1. The first that fits counts.
        """
        rest = self.rest
        for index, text in enumerate(texts):
            if rest.startswith(text):
                return index
            if len(rest) < len(text) and text.startswith(rest):
                return None
        return -1

    def before(self, ends: tuple[str, ...]) -> tuple[str, str]:
        """Read up to the first of some texts; give what was read, and which text comes, if any.

        What may be the beginning of one is not read until the text is complete.
        """
        if beginning_of(ends)(self.text, self.at) is None:
            return self.skip(len(self.text) - self.at), ""
        place, end = first_of(self.text, ends, self.at)
        if place < 0:
            place = len(self.text) - (0 if self.final else held_back(self.rest, ends))
        return self.skip(place - self.at), end

    def until(self, ends: tuple[str, ...], most: int) -> Generator[None, None, str]:
        """Wait for one of the texts, and give what stands before it, without reading it.

        Raises:
            Refused: that is longer than `most` characters.
        """
        while (place := first_of(self.text, ends, self.at)[0]) < 0:
            if len(self.rest) - held_back(self.rest, ends) > most:
                raise Refused
            yield
        if place - self.at > most:
            raise Refused
        return self.text[self.at : place]

    def one_of(self, texts: tuple[str, ...]) -> Generator[None, None, str]:
        """Read one of the texts, after whitespace, and return which.

        Raises:
            Refused: none of them comes.
        """
        yield from self.space()
        while (found := self.find(texts)) is None:
            if self.final:  # a text that was cut off
                self.skip(len(self.rest))
            yield
        if found < 0:
            raise Refused
        return self.skip(len(texts[found]))

    def maybe(self, texts: tuple[str, ...]) -> Iterator[None]:
        """Read one of the texts, if it comes, and the whitespace before them."""
        yield from self.space()
        while (found := self.find(texts)) is None:
            if self.final and self.name is not None:
                self.skip(len(self.rest))
            yield
        if found >= 0:
            self.skip(len(texts[found]))

    def json(
        self, *, streams: bool = False, gives_rest: bool = False
    ) -> Generator[None, None, str]:
        """Read a JSON value, after whitespace, and return its text.

        With `streams` it goes to the arguments as it comes. With `gives_rest`, a value that is cut
        off goes there, too.

        Raises:
            Refused: it is not JSON.
        """
        yield from self.space()
        scanner = JsonScanner()
        while True:
            if streams:
                self.at = scanner.feed(self.text, self.at)
                self._given.append(scanner.take())
                self.loose = scanner.pending
            else:
                self.skip(scanner.feed(self.text, self.at) - self.at)
            if scanner.state is not State.OPEN:
                break
            if self.final and (streams or gives_rest):
                self.give(scanner.take() + scanner.pending)
            yield
        if scanner.state is State.FAILED:
            raise Refused
        return scanner.text

    def string(self) -> Generator[None, None, str]:
        yield from self.space()
        if self.text[self.at] != '"':
            raise Refused
        value: str = json.loads((yield from self.json()))
        return value


def is_text(value: str) -> bool:
    """True if a string has no half of a surrogate pair, which could not be sent on."""
    return SURROGATE.search(value) is None


def json_characters(text: str) -> str:
    """Write text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
