"""A place in text that comes piece by piece, for readers that are written as generators.

A generator reads on until it needs more text, and yields. It decides only what further text cannot
change, so that the result does not depend on the pieces.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator
from typing import TypeAlias

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
        """Add the value of all text so far to the arguments."""
        self._given.append(arguments)
        self.loose = ""

    def give_name(self, name: str) -> None:
        """Set the name, which all text so far stands for."""
        if not name or not is_text(name):
            raise Refused
        self.name = name
        self.loose = ""

    def taken(self) -> str:
        """Give the arguments since the last time."""
        given, self._given = "".join(self._given), []
        return given

    # -- reading

    @property
    def rest(self) -> str:
        """The text that has arrived and is not read."""
        return self.text[self.at :]

    def skip(self, count: int) -> str:
        """Read characters, and give them."""
        read = self.text[self.at : self.at + count]
        self.at += len(read)
        self.loose += read
        return read

    def character(self) -> Iterator[None]:
        """Wait for the next character."""
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
            Refused: it is no JSON.
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
        """Read a JSON string, after whitespace, and return its value."""
        yield from self.space()
        if self.text[self.at] != '"':
            raise Refused
        value: str = json.loads((yield from self.json()))
        return value


def is_text(value: str) -> bool:
    """Whether a string has no half of a surrogate pair, which could not be sent on."""
    return SURROGATE.search(value) is None


def json_characters(text: str) -> str:
    """Write text as the inside of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
