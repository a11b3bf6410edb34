"""A server on a Unix socket that is played by hand, in the place of a child."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio
import trio.testing

#: Plays one connection, given what has been read: the head of a request, and maybe more.
Play = Callable[[trio.SocketStream, bytes], Awaitable[None]]

SSE_HEAD = b"HTTP/1.1 200 \r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


@asynccontextmanager
async def playing(play: Play) -> AsyncIterator[Path]:
    """Serve connections; gives the path of the socket."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "child.sock"
        listener = trio.socket.socket(trio.socket.AF_UNIX)
        await listener.bind(str(path))
        listener.listen()

        async def serve_one(stream: trio.SocketStream) -> None:
            async with stream:
                head = b""
                while b"\r\n\r\n" not in head:
                    head += await stream.receive_some()
                await play(stream, head)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(trio.serve_listeners, serve_one, [trio.SocketListener(listener)])
            yield path
            nursery.cancel_scope.cancel()


async def send(stream: trio.SocketStream, *parts: bytes) -> None:
    """Send parts so that each is read by itself."""
    for part in parts:
        await stream.send_all(part)
        await trio.testing.wait_all_tasks_blocked(0.01)
