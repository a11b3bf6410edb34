"""One request to a child over its Unix socket, as in `trioserve.router.forward`, but in asyncio."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from trioserve.errors import ModelProcessError
from trioserve.router.forward import AT_ONCE, AnswerReader, NotTakenError, Outgoing


@asynccontextmanager
async def exchange(
    path: Path, request: Outgoing, held: set[socket.socket] | None = None
) -> AsyncIterator[Answer]:
    """Send a request to a child; gives the answer once its head is there.

    Leaving the block closes the connection, and so the child learns that nobody waits any longer.
    That does not wait for anything, so it happens whatever the block is left for.

    Args:
        path: where the child listens.
        request: what is sent.
        held: has the connection as long as it is open. Whoever shuts it down ends the answer.

    Raises:
        NotTakenError: the child does not listen.
        ModelProcessError: it ended before it had answered.
    """
    loop = asyncio.get_running_loop()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    held = set() if held is None else held
    held.add(connection)
    try:
        connection.setblocking(False)
        try:
            connection.connect(str(path))  # which does not wait
        except OSError as error:
            raise NotTakenError from error
        answer = Answer(connection, is_empty=request.method == "HEAD")
        with suppress(OSError):  # it does not want the rest of the body: its answer says why
            await loop.sock_sendall(connection, request.head() + request.body)
        await answer.wait_head()
        yield answer
    finally:
        held.discard(connection)
        connection.close()


class Answer(AnswerReader):
    """What a child answers. Made by `exchange`."""

    def __init__(self, connection: socket.socket, *, is_empty: bool) -> None:
        super().__init__(is_empty=is_empty)
        self._connection = connection
        self._loop = asyncio.get_running_loop()

    async def read(self) -> None:
        """See `AnswerReader.read`."""
        try:
            self.feed(await self._loop.sock_recv(self._connection, AT_ONCE))
        except OSError as error:
            raise ModelProcessError from error
