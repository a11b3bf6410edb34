"""How a replica learns that an ingress has died: a connection between the two breaks.

Ray does not notify a replica when its caller dies, so requests of a dead ingress would run to their
ends. No data is sent on such a connection.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from contextlib import suppress
from typing import TypeAlias

_log = logging.getLogger("ray.serve")

#: Where an ingress listens: its host and its port.
Address: TypeAlias = tuple[str, int]

#: Seconds that connecting may take.
_CONNECT_TIMEOUT = 5.0

#: A machine that is gone does not answer: seconds of silence until it is asked, and between two
#: questions, and how many may stay without an answer.
_KEEPALIVE = {"TCP_KEEPIDLE": 5, "TCP_KEEPINTVL": 2, "TCP_KEEPCNT": 3}


class Anchor:
    """The end of an ingress. `address` is where, once it has begun.

    Args:
        host: the address of this machine within the cluster.
    """

    def __init__(self, host: str) -> None:
        self.address: Address | None = None
        self._host = host
        self._server: asyncio.Server | None = None

    async def begin(self) -> None:
        """Begin to listen. Where the system does not let us, replicas do without."""
        try:
            self._server = await asyncio.start_server(self._hold, self._host, 0)
        except OSError as error:
            _log.warning("replicas will not learn of this ingress's end: %s", error)
        else:
            self.address = (self._host, self._server.sockets[0].getsockname()[1])

    def end(self) -> None:
        """Close the listening socket."""
        if self._server is not None:
            self._server.close()

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Hold a connection until the other side closes it, or sends data."""
        try:
            with suppress(OSError):
                await reader.read(1)
        finally:
            writer.close()


class Lifelines:
    """The ends of a replica: one connection to each ingress that has requests here."""

    def __init__(self) -> None:
        self._held: dict[Address, set[socket.socket]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._has_warned = False

    def of(self, address: Address | None) -> set[socket.socket]:
        """Where to keep the connections that are to break when an ingress dies."""
        if address is None:
            return set()
        if address not in self._held:
            self._held[address] = set()
            task = asyncio.create_task(self._watch(address))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        return self._held[address]

    def close(self) -> None:
        """Stop watching."""
        for task in self._tasks:
            task.cancel()

    async def _watch(self, address: Address) -> None:
        """Wait until an ingress has gone, and break the connections held for it."""
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT):
                reader, writer = await asyncio.open_connection(*address)
        except (OSError, TimeoutError) as error:
            if not self._has_warned:
                self._has_warned = True
                _log.warning("the end of an ingress at %s would not be noticed: %s", address, error)
            del self._held[address]  # the next request tries again
            return
        _keep_alive(writer.get_extra_info("socket"))
        try:
            with suppress(OSError):  # its machine may be lost
                await reader.read()
        finally:
            writer.close()
            held = self._held.pop(address)
        for connection in held:
            with suppress(OSError):  # it has ended
                connection.shutdown(socket.SHUT_RDWR)


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
