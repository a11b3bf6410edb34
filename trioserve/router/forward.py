"""One request to a child, and its answer as it comes.

Leaving the block closes the connection, and so the child learns that nobody waits any longer.
"""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import trio

from trioserve.errors import ModelProcessError
from trioserve.router.wire import AT_ONCE, AnswerReader, NotTakenError, Outgoing

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
    """Whether a connection is open, and has nothing to say."""
    try:
        connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


@contextmanager
def connect(
    path: Path, kept: Kept | None = None, ended: trio.Event | None = None
) -> Iterator[Connection]:
    """Connect to the Unix socket of a child, for one request.

    The connection is closed at the end of the block, however that comes; or it is kept for another
    request, if the answer was received to its end.

    Args:
        path: where the child listens.
        kept: connections to it that are there already.
        ended: set when the child has ended, if anybody watches it.

    Raises:
        NotTakenError: the child does not listen: it has ended, or is about to.
        ModelProcessError: too many wait for it already.
    """
    try:
        made = _connect(path) if kept is None else kept.take(path)
    except (ConnectionRefusedError, FileNotFoundError) as error:
        raise NotTakenError from error
    except OSError as error:
        raise ModelProcessError("The process of the model takes no requests.") from error
    is_done = False
    try:
        yield (connection := Connection(made, ended))
        is_done = connection.is_at_rest
    finally:
        if is_done and kept is not None:
            kept.give_back(made)
        else:
            made.close()


class Connection:
    """A connection to a child, for one request. Made by `connect`."""

    def __init__(self, connection: socket.socket, ended: trio.Event | None) -> None:
        self._connection = connection
        self._ended = ended
        self._answer: Answer | None = None

    @property
    def is_at_rest(self) -> bool:
        """Whether the answer was received to its end, and the child leaves the connection open."""
        answer = self._answer
        return answer is not None and answer.ended and answer.header(b"connection") != b"close"

    async def ask(self, request: Outgoing) -> Answer:
        """Send the request, and wait for the head of the answer.

        Raises:
            NotTakenError: the child has ended, and had not read all of the request.
            ModelProcessError: it ended before it had answered.
        """
        await _send(self._connection, request.head() + request.body)
        answer = Answer(self._connection, is_empty=request.method == "HEAD")
        try:
            await answer.wait_head()
        except ModelProcessError as error:
            # Linux says so if there was more to read than the other side had read.
            was_unread = isinstance(error.__cause__, ConnectionResetError)
            if was_unread and not answer.has_begun and await self._has_ended():
                raise NotTakenError from error
            raise
        self._answer = answer
        return answer

    async def _has_ended(self) -> bool:
        """Whether the child has ended, of which word may come a moment later."""
        if self._ended is None:
            return False
        with trio.move_on_after(_WORD):
            await self._ended.wait()
        return self._ended.is_set()


@asynccontextmanager
async def exchange(
    path: Path, request: Outgoing, kept: Kept | None = None
) -> AsyncIterator[Answer]:
    """Send a request to a child; gives the answer once its head is there. Raises as `connect`."""
    with connect(path, kept) as connection:
        yield await connection.ask(request)


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
    """What a child answers. Made by `Connection.ask`.

    `status` and `headers` are known from the start; `receive` gives the body.
    """

    def __init__(self, connection: socket.socket, *, is_empty: bool = False) -> None:
        super().__init__(is_empty=is_empty)
        self._connection = connection

    async def read(self) -> None:
        """See `AnswerReader.read`."""
        await trio.lowlevel.wait_readable(self._connection)
        try:
            data = self._connection.recv(AT_ONCE)
        except BlockingIOError:
            return
        except OSError as error:
            raise ModelProcessError from error
        self.feed(data)
