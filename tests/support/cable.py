"""A network between a browser and a server, which a test can cut."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

#: Closing a socket sends a reset.
_NO_LINGER = struct.pack("ii", 1, 0)


class Cable:
    """Forwards connections to `target`, a base URL, while it is plugged in.

    Unplugged, it ends all connections without a farewell, and refuses new ones in the same way.

    Attributes:
        url: where it listens.
        target: where it leads; it may be changed.
        n_connections: how many were accepted.
    """

    def __init__(self, target: str) -> None:
        self.url = ""
        self.target = target
        self.n_connections = 0
        self._is_plugged_in = True
        self._connections: set[trio.CancelScope] = set()

    async def unplug(self) -> None:
        """Cut all connections."""
        self._is_plugged_in = False
        for connection in list(self._connections):
            connection.cancel()

    async def plug_in(self, target: str = "") -> None:
        """Let new connections through, to another server if one is given."""
        self.target = target or self.target
        self._is_plugged_in = True

    async def _forward(self, near: trio.SocketStream) -> None:
        self.n_connections += 1
        with trio.CancelScope() as scope:
            self._connections.add(scope)
            try:
                if self._is_plugged_in:
                    await self._connect(near)
            finally:
                self._connections.discard(scope)
                near.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
                near.socket.close()

    async def _connect(self, near: trio.SocketStream) -> None:
        host, port = self.target.removeprefix("http://").split(":")
        try:
            far = await trio.open_tcp_stream(host, int(port))
        except OSError:
            return  # as if no server listened
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_copy, near, far)
                nursery.start_soon(_copy, far, near)
        finally:
            far.socket.close()


async def _copy(source: trio.SocketStream, target: trio.SocketStream) -> None:
    try:
        async for data in source:
            await target.send_all(data)
        await target.send_eof()
    except (trio.BrokenResourceError, trio.ClosedResourceError):
        pass  # the other side has gone; its own copy ends as well


@asynccontextmanager
async def cable_to(target: str) -> AsyncIterator[Cable]:
    """Listen on a free port, and forward to the server at this URL."""
    cable = Cable(target)
    listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
    cable.url = f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.serve_listeners, cable._forward, listeners)
        yield cable
        nursery.cancel_scope.cancel()
