"""HTTP/1.1 with a child, without the event loop: requests as bytes, and bytes as an answer.

By hand, because of what an event of a stream costs on its way. The other side is a server of our
own on the same machine, so an answer is a head, and a body that has a length or comes in chunks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TypeAlias

import attrs

from trioserve.errors import ModelProcessError

#: Names in lower case, and values.
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

#: Bytes that are read at once.
AT_ONCE = 64 * 1024

#: Bytes of a head; a child sends a few hundred.
_MAX_HEAD = 64 * 1024

#: Headers of a request that end at a proxy: they are about the connection, or it has obeyed them.
REQUEST_HOP = frozenset(
    b"connection content-length expect host keep-alive origin proxy-authorization te trailer "
    b"transfer-encoding upgrade x-request-id x-request-waited".split()
)

#: Headers of an answer that a proxy does not pass on: its own answer has them anew.
ANSWER_HOP = frozenset(
    b"connection content-length date keep-alive server transfer-encoding vary x-request-id".split()
)

#: Types of bodies that are streams of events, or of lines.
STREAMS = (b"text/event-stream", b"application/x-ndjson")


class NotTakenError(ModelProcessError):
    """The child does not listen, or has ended and left a part of the request unread.

    So it has done nothing for the request, which may go to another child.
    """

    def __init__(self) -> None:
        super().__init__("The process of the model takes no requests.")


@attrs.frozen
class Outgoing:
    """A request as it is sent. `headers` are without those that say where the body ends."""

    method: str
    target: str
    headers: Headers
    body: bytes = b""

    def head(self) -> bytes:
        """Write what comes before the body."""
        lines = [f"{self.method} {self.target} HTTP/1.1\r\nhost: localhost\r\n".encode()]
        lines += [b"%b: %b\r\n" % header for header in self.headers]
        if self.body or self.method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d\r\n" % len(self.body))
        return b"".join(lines) + b"\r\n"


class AnswerReader(ABC):
    """Reads an answer from the bytes that are fed to it, which `read` does.

    `status` and `headers` are known once `read_head` has returned true.
    """

    def __init__(self, *, is_empty: bool = False) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._is_empty = is_empty  # whatever its headers say
        self._buffer = b""
        self._left: int | None = 0  # bytes of the body that are to come; None: it has chunks

    def header(self, name: bytes) -> bytes:
        """The value of a header; empty when there is none."""
        return next((value for each, value in self.headers if each == name), b"")

    @property
    def has_begun(self) -> bool:
        """Whether anything has come."""
        return bool(self._buffer or self.status)

    @property
    def ended(self) -> bool:
        """Whether all of the body was taken."""
        return self._left == 0

    def feed(self, data: bytes) -> None:
        """Take what came.

        Raises:
            ModelProcessError: nothing did, so the child has ended.
        """
        if not data:
            raise ModelProcessError
        self._buffer += data

    def read_head(self) -> bool:
        """Read the status and the headers; returns whether they are there. Raises as `feed`."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _MAX_HEAD:
                raise ModelProcessError("The process of the model answers with what is no HTTP.")
            return False
        first, *lines = self._buffer[:end].split(b"\r\n")
        self._buffer = self._buffer[end + 4 :]
        self.status = int(first.split(b" ", 2)[1])
        for line in lines:
            name, _, value = line.partition(b":")
            self.headers.append((name.lower(), value.strip()))
        if self._is_empty or self.status in (204, 304):
            return True
        if self.header(b"transfer-encoding") == b"chunked":
            self._left = None
        else:
            self._left = int(self.header(b"content-length") or 0)
        return True

    def take(self) -> bytes:
        """Take what is there of the body, of chunks whole ones. Empty: feed more, or it ended."""
        return self._chunks() if self._left is None else self._plain(self._left)

    @abstractmethod
    async def read(self) -> None:
        """Wait for more bytes, and feed them. Raises ModelProcessError: the child has ended."""

    async def wait_head(self) -> None:
        """Wait for the status and the headers. Raises ModelProcessError."""
        while not self.read_head():
            await self.read()

    async def receive(self) -> bytes:
        """Wait for more of the body: all that is there, of chunks whole ones. Empty at the end.

        Raises:
            ModelProcessError: the child ended before the body did.
        """
        while not self.ended:
            if data := self.take():
                return data
            if not self.ended:
                await self.read()
        return b""

    async def receive_all(self) -> bytes:
        """Wait for the rest of the body. Raises ModelProcessError."""
        parts = []
        while part := await self.receive():
            parts.append(part)
        return b"".join(parts)

    def _plain(self, n_left: int) -> bytes:
        data, self._buffer = self._buffer[:n_left], self._buffer[n_left:]
        self._left = n_left - len(data)
        return data

    def _chunks(self) -> bytes:
        """Take the chunks that are there as a whole. A child sends each event as one."""
        buffer, position, parts = self._buffer, 0, []
        while (line_end := buffer.find(b"\r\n", position)) >= 0:
            start = line_end + 2
            end = start + int(buffer[position:line_end], 16)
            if len(buffer) < end + 2:
                break
            position = end + 2
            if start == end:
                self._left = 0
                break
            parts.append(buffer[start:end])
        self._buffer = buffer[position:]
        return b"".join(parts)
