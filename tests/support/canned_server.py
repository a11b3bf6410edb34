"""A server that answers every request with the same bytes."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

from benchmarks.plan import Address
from benchmarks.selfcheck import read_request


@contextlib.contextmanager
def serving_bytes(*answers: bytes, keep: int = 1) -> Iterator[Address]:
    """Serve connections one after the other: `keep` requests each, all with the next answer."""

    def serve() -> None:
        for answer in answers:
            connection, _ = listener.accept()
            with connection:
                for _ in range(keep):
                    read_request(connection)
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield Address("127.0.0.1", listener.getsockname()[1])
        thread.join(10)
        assert not thread.is_alive()
