"""`LineReader` and `Pace`: what a program writes, read line by line and no faster than is good."""

from __future__ import annotations

import math

import trio

_CHUNK = 2**16


class LineTooLongError(Exception):
    """A line is longer than it may be."""


class LineReader:
    """Splits what comes from a stream into lines.

    Args:
        stream: where it comes from.
        max_bytes: of a line.
    """

    def __init__(self, stream: trio.abc.ReceiveStream, max_bytes: int) -> None:
        self._stream = stream
        self._max_bytes = max_bytes
        self._buffer = bytearray()
        self._searched = 0  # so many bytes of the buffer hold no end of a line

    async def next(self) -> bytes | None:
        """The next line without its end; None: there is none. What has no end is no line.

        Raises:
            LineTooLongError: it is longer than `max_bytes`.
        """
        while (end := self._buffer.find(b"\n", self._searched)) < 0:
            self._searched = len(self._buffer)
            if self._searched > self._max_bytes:
                raise LineTooLongError
            chunk = await self._stream.receive_some(_CHUNK)
            if not chunk:
                return None
            self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._searched = 0
        return line


class Pace:
    """Makes whoever does too much wait. What is enough for a second may be done at once."""

    def __init__(self, per_second: float) -> None:
        self._per_second = per_second
        self._due = -math.inf

    async def step(self, amount: float = 1) -> None:
        """Wait until this much more may be done. Always a checkpoint."""
        self._due = max(self._due, trio.current_time() - 1) + amount / self._per_second
        await trio.sleep_until(self._due)
