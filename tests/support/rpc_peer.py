"""A peer in the place of an RPC server, which answers as a test says."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

#: Handles one connection, which is closed when it returns.
Handler: TypeAlias = Callable[[socket.socket], None]

VERSION = (7, 0, 0)


def answers(
    version: tuple[int, int, int] = VERSION, *, n_devices: int = 1, free: int = 2**30
) -> Handler:
    """Be an RPC server that only answers questions about itself."""

    def handle(connection: socket.socket) -> None:
        while len(head := connection.recv(9, socket.MSG_WAITALL)) == 9:
            command, length = struct.unpack("<BQ", head)
            connection.recv(length, socket.MSG_WAITALL)
            body = {
                14: bytes((*version, 0)) + bytes(24),
                15: struct.pack("<I", n_devices),
                11: struct.pack("<QQ", free, 2 * free),
            }[command]
            connection.sendall(struct.pack("<Q", len(body)) + body)

    return handle


def says(data: bytes) -> Handler:
    """Send the same bytes to every client, and read until it disconnects."""

    def handle(connection: socket.socket) -> None:
        connection.sendall(data)
        while connection.recv(4096):
            pass

    return handle


def closes(connection: socket.socket) -> None:
    """Read the greeting, then close the connection."""
    connection.recv(9 + 24, socket.MSG_WAITALL)


@contextmanager
def listening(handle: Handler | None, port: int = 0) -> Iterator[str]:
    """Listen on this machine; yields ``HOST:PORT``. Without a handler, no client gets an answer."""
    with socket.create_server(("127.0.0.1", port)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return  # the end
                with connection:
                    try:
                        assert handle is not None
                        handle(connection)
                    except ConnectionError:
                        pass  # the client disconnected first

        thread = threading.Thread(target=serve, daemon=True)
        if handle is not None:
            thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            if handle is not None:
                server.shutdown(socket.SHUT_RDWR)
                thread.join()


def dead_end() -> str:
    """A port of this machine where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"
