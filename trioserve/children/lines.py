"""`Lines`: splits what a program writes into lines, and bounds them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import trio

_CHUNK = 2**16


class LineTooLongError(Exception):
    """A line is longer than it may be."""


class Lines:
    """Finds the lines in what a program writes. It reads nothing itself.

    Args:
        max_bytes: of a line.
        cut: whether each `max_bytes` of a longer line count as a line.
    """

    def __init__(self, max_bytes: float = math.inf, *, cut: bool = False) -> None:
        self._max_bytes = max_bytes
        self._cut = cut
        self._held = bytearray()
        self._searched = 0  # bytes that are known to have no newline

    @property
    def rest(self) -> bytes:
        """The last line, whose end has not come. Only when the others were taken."""
        return bytes(self._held)

    def feed(self, data: bytes | bytearray) -> Iterator[bytes]:
        """Take more bytes; gives the lines that are complete, as `take` does."""
        self._held += data
        return iter(self.take, None)

    def take(self) -> bytes | None:
        """The next line, without its newline; None: no other is complete.

        Raises:
            LineTooLongError: it is too long; no other can be taken.
        """
        most = int(min(len(self._held), self._max_bytes + 1))
        end = self._held.find(b"\n", self._searched, most)
        self._searched = end if end >= 0 else most
        if self._searched > self._max_bytes:
            if not self._cut:
                raise LineTooLongError
            return self._remove(most - 1, 0)
        return None if end < 0 else self._remove(end, 1)

    def _remove(self, length: int, n_newlines: int) -> bytes:
        line = bytes(self._held[:length])
        del self._held[: length + n_newlines]
        self._searched = 0
        return line


class LineReader:
    """Reads lines from a stream of Trio."""

    def __init__(self, stream: trio.abc.ReceiveStream, max_bytes: float = math.inf) -> None:
        self._stream = stream
        self._lines = Lines(max_bytes)

    async def next(self) -> bytes | None:
        """The next line without its newline; None at the end. An incomplete line is ignored.

        Raises:
            LineTooLongError: it is longer than `max_bytes`.
        """
        while (line := self._lines.take()) is None:
            if not (data := await self._stream.receive_some(_CHUNK)):
                return None
            self._lines.feed(data)
        return line
