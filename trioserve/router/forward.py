"""HTTP/1.1 with a child over its Unix socket: one request, and its answer as it comes.

By hand, because of what an event of a stream costs on its way. The other side is a server of our
own on the same machine, so an answer is a head, and a body that has a length or comes in chunks.
Leaving the block closes the connection, which the child notices: it cancels the request.
"""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import TypeAlias

import attrs
import trio

from trioserve.errors import ModelProcessError

#: Names in lower case, and values.
Headers: TypeAlias = Sequence[tuple[bytes, bytes]]

#: Bytes that are read at once.
_AT_ONCE = 64 * 1024

#: Bytes of a head; a child sends a few hundred.
_MAX_HEAD = 64 * 1024


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
        """Write the part before the body."""
        lines = [f"{self.method} {self.target} HTTP/1.1\r\nhost: localhost\r\n".encode()]
        lines += [b"%b: %b\r\n" % header for header in self.headers]
        if self.body or self.method not in ("GET", "HEAD"):
            lines.append(b"content-length: %d\r\n" % len(self.body))
        return b"".join(lines) + b"\r\n"


@attrs.frozen
class SocketIO:
    """How an event loop waits for a socket that does not block. Both may raise OSError."""

    receive: Callable[[socket.socket, int], Awaitable[bytes]]
    send: Callable[[socket.socket, bytes], Awaitable[None]]


async def _receive(connection: socket.socket, n_bytes: int) -> bytes:
    while True:
        await trio.lowlevel.wait_readable(connection)
        try:
            return connection.recv(n_bytes)
        except BlockingIOError:
            continue


async def _send(connection: socket.socket, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[connection.send(left) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(connection)


TRIO = SocketIO(_receive, _send)

#: Seconds that a connection is kept for another request. A child closes one after five.
_KEEP = 2.0

#: Seconds in which it gets known that a child has ended, after its connections were closed.
_WORD = 5.0

#: Connections to one child that are kept.
_MAX_KEPT = 16


class Kept:
    """Connections to one child that are kept for the next request, which they make cheaper.

    Each is kept for less time than a child leaves one open, so none is closed while it is taken.
    """

    def __init__(self) -> None:
        self._idle: list[tuple[float, socket.socket]] = []  # since when
        self._closed = False

    def take(self, path: Path) -> socket.socket:
        """Give the connection that was used last, or a new one. Raises OSError."""
        self._forget(trio.current_time() - _KEEP)
        while self._idle:
            _, connection = self._idle.pop()
            if _is_silent(connection):
                return connection
            connection.close()
        return _connect(path)

    def give_back(self, connection: socket.socket) -> None:
        """Keep a connection whose last answer was received to its end."""
        now = trio.current_time()
        self._idle.append((now, connection))
        self._forget(math.inf if self._closed else now - _KEEP)
        if len(self._idle) > _MAX_KEPT:
            self._idle.pop(0)[1].close()

    def close(self) -> None:
        """Close all of them, and keep none from now on."""
        self._closed = True
        self._forget(math.inf)

    def _forget(self, until: float) -> None:
        while self._idle and self._idle[0][0] <= until:
            self._idle.pop(0)[1].close()


def _connect(path: Path) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        connection.setblocking(False)
        connection.connect(str(path))  # which does not wait
    except OSError:
        connection.close()
        raise
    return connection


def _is_silent(connection: socket.socket) -> bool:
    """Whether a connection is open, and has no data to read."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def connect(
    path: Path,
    kept: Kept | None = None,
    ended: trio.Event | None = None,
    *,
    io: SocketIO = TRIO,
    held: set[socket.socket] | None = None,
) -> Iterator[ChildConnection]:
    """Connect to the Unix socket of a child, for one request.

    The connection is closed at the end of the block, however that comes; or it is kept for another
    request, if the answer was received to its end.

    Args:
        path: where the child listens.
        kept: connections to it from before.
        ended: set when the child has ended; none: it is not watched.
        io: that of the event loop.
        held: has the connection during the block. Shutting it down ends the answer.

    Raises:
        NotTakenError: the child does not listen, or too many wait for it already.
    """
    try:
        made = _connect(path) if kept is None else kept.take(path)
    except OSError as error:
        raise NotTakenError from error
    is_done, held = False, set() if held is None else held
    held.add(made)
    try:
        yield (connection := ChildConnection(made, io, ended))
        is_done = connection.is_at_rest
    finally:
        held.discard(made)
        if is_done and kept is not None:
            kept.give_back(made)
        else:
            made.close()


class ChildConnection:
    """A connection to a child, for one request. Made by `connect`."""

    def __init__(
        self, connection: socket.socket, io: SocketIO, ended: trio.Event | None = None
    ) -> None:
        self._connection = connection
        self._io = io
        self._ended = ended
        self._answer: ChildAnswer | None = None

    @property
    def is_at_rest(self) -> bool:
        """Whether the answer was received to its end, and the child leaves the connection open."""
        answer = self._answer
        return answer is not None and answer.ended and answer.header(b"connection") != b"close"

    async def ask(self, request: Outgoing) -> ChildAnswer:
        """Send the request, and wait for the head of the answer.

        Raises:
            NotTakenError: the child has ended, and had not read all of the request.
            ModelProcessError: it ended before it had answered.
        """
        with suppress(OSError):  # it refuses the rest of the body: its answer says why
            await self._io.send(self._connection, request.head() + request.body)
        answer = ChildAnswer(self._connection, self._io, is_empty=request.method == "HEAD")
        try:
            await answer.wait_head()
        except ModelProcessError as error:
            # Linux resets a connection if the other side had not read all.
            was_unread = isinstance(error.__cause__, ConnectionResetError)
            if was_unread and not answer.has_begun and await self._has_ended():
                raise NotTakenError from error
            raise
        self._answer = answer
        return answer

    async def _has_ended(self) -> bool:
        """Whether the child has ended, which may become known a moment later."""
        if self._ended is None:
            return False
        with trio.move_on_after(_WORD):
            await self._ended.wait()
        return self._ended.is_set()


@asynccontextmanager
async def exchange(
    path: Path,
    request: Outgoing,
    kept: Kept | None = None,
    *,
    io: SocketIO = TRIO,
    held: set[socket.socket] | None = None,
) -> AsyncIterator[ChildAnswer]:
    """Send a request to a child; gives the answer once its head is there. As `connect`."""
    with connect(path, kept, io=io, held=held) as connection:
        yield await connection.ask(request)


async def ask(path: Path, request: Outgoing, *, patience: float) -> bytes | None:
    """Send a request to a child; gives the body of a good answer.

    None: the child has ended, has not answered within this number of seconds, or not with 200.
    """
    with trio.move_on_after(patience), suppress(ModelProcessError):  # the log has its end
        async with exchange(path, request) as answer:
            body = await answer.receive_all()
            return body if answer.status == 200 else None
    return None


class ChildAnswer:
    """What a child answers. Made by `ChildConnection.ask`.

    `status` and `headers` are known from the start; `receive` gives the body.
    """

    def __init__(self, connection: socket.socket, io: SocketIO, *, is_empty: bool = False) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._connection, self._io = connection, io
        self._is_empty = is_empty  # whatever its headers say
        self._buffer = b""
        self._left: int | None = 0  # bytes of the body that are to come; None: it has chunks

    def header(self, name: bytes) -> bytes:
        """The value of a header; empty when there is none."""
        return next((value for each, value in self.headers if each == name), b"")

    @property
    def has_begun(self) -> bool:
        """Whether any data has arrived."""
        return bool(self._buffer or self.status)

    @property
    def ended(self) -> bool:
        """Whether all of the body was taken."""
        return self._left == 0

    async def wait_head(self) -> None:
        """Wait for the status and the headers. Raises ModelProcessError."""
        while (end := self._buffer.find(b"\r\n\r\n")) < 0:
            if len(self._buffer) > _MAX_HEAD:
                raise ModelProcessError("The process of the model answers with what is no HTTP.")
            await self._read()
        first, *lines = self._buffer[:end].split(b"\r\n")
        self._buffer = self._buffer[end + 4 :]
        self.status = int(first.split(b" ", 2)[1])
        for line in lines:
            name, _, value = line.partition(b":")
            self.headers.append((name.lower(), value.strip()))
        if self._is_empty or self.status in (204, 304):
            return
        if self.header(b"transfer-encoding") == b"chunked":
            self._left = None
        else:
            self._left = int(self.header(b"content-length") or 0)

    def take(self) -> bytes:
        """Take the received part of the body, only whole chunks; possibly nothing."""
        return self._chunks() if self._left is None else self._plain(self._left)

    async def receive(self) -> bytes:
        """Wait for more of the body: all that was received, only whole chunks. Empty at the end.

        Raises:
            ModelProcessError: the child ended before the body did.
        """
        while self._left != 0:
            if data := self.take():
                return data
            if self._left != 0:
                await self._read()
        return b""

    async def receive_all(self) -> bytes:
        """Wait for the rest of the body. Raises ModelProcessError."""
        parts = []
        while part := await self.receive():
            parts.append(part)
        return b"".join(parts)

    async def _read(self) -> None:
        """Wait for more bytes. Raises ModelProcessError: the child has ended."""
        try:
            data = await self._io.receive(self._connection, _AT_ONCE)
        except OSError as error:
            raise ModelProcessError from error
        if not data:
            raise ModelProcessError
        self._buffer += data

    def _plain(self, n_left: int) -> bytes:
        data, self._buffer = self._buffer[:n_left], self._buffer[n_left:]
        self._left = n_left - len(data)
        return data

    def _chunks(self) -> bytes:
        """Take the chunks that are complete. A child sends each event as one."""
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
