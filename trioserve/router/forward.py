"""One request to a child, and its answer as it comes.

Leaving the block closes the connection, and so the child learns that nobody waits any longer.
"""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from trioserve.errors import ModelProcessError
from trioserve.router.wire import AT_ONCE, AnswerReader, Outgoing

#: Seconds that a connection is kept for another request. A child closes one after five.
_KEEP = 2.0

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
    """Whether a connection is open, and has nothing to say."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@asynccontextmanager
async def exchange(
    path: Path, request: Outgoing, kept: Kept | None = None
) -> AsyncIterator[Answer]:
    """Send a request to the Unix socket of a child; gives the answer once its head is there.

    The connection is closed at the end of the block, however that comes; or it is kept for another
    request, if the answer was received to its end.

    Raises:
        ModelProcessError: the child does not listen, or ended before it had answered.
    """
    try:
        connection = _connect(path) if kept is None else kept.take(path)
    except OSError as error:
        raise ModelProcessError("The process of the model takes no requests.") from error
    is_done = False
    try:
        await _send(connection, request.head() + request.body)
        answer = Answer(connection, is_empty=request.method == "HEAD")
        await answer.wait_head()
        yield answer
        is_done = answer.ended and answer.header(b"connection") != b"close"
    finally:
        if is_done and kept is not None:
            kept.give_back(connection)
        else:
            connection.close()


async def _send(connection: socket.socket, data: bytes) -> None:
    left = memoryview(data)
    while left:
        try:
            left = left[connection.send(left) :]
        except BlockingIOError:
            await trio.lowlevel.wait_writable(connection)
        except OSError:
            return  # it does not want the rest of the body: its answer says why, if there is one


class Answer(AnswerReader):
    """What a child answers. Made by `exchange`.

    `status` and `headers` are known from the start; `receive` gives the body.
    """

    def __init__(self, connection: socket.socket, *, is_empty: bool = False) -> None:
        super().__init__(is_empty=is_empty)
        self._connection = connection

    async def wait_head(self) -> None:
        """Wait for the status and the headers. Raises ModelProcessError."""
        while not self.read_head():
            await self._read()

    async def receive(self) -> bytes:
        """Wait for more of the body: all that is there, of chunks whole ones. Empty at the end.

        Raises:
            ModelProcessError: the child ended before the body did.
        """
        while not self.ended:
            if data := self.take():
                return data
            if not self.ended:
                await self._read()
        return b""

    async def receive_all(self) -> bytes:
        """Wait for the rest of the body. Raises ModelProcessError."""
        parts = []
        while part := await self.receive():
            parts.append(part)
        return b"".join(parts)

    async def _read(self) -> None:
        await trio.lowlevel.wait_readable(self._connection)
        try:
            data = self._connection.recv(AT_ONCE)
        except BlockingIOError:
            return
        except OSError as error:
            raise ModelProcessError from error
        self.feed(data)
