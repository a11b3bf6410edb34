"""Servers that send known bytes: one answer after the other, or by the path of the request."""

from __future__ import annotations

import contextlib
import itertools
import json
import socket
import socketserver
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from benchmarks.driver import Address
from tests.support.threaded_server import serving_handler


def read_request(connection: socket.socket) -> bytes:
    """Read one request with a Content-Length, and return it."""
    data = b""
    while b"\r\n\r\n" not in data:
        data += connection.recv(65536)
    head, _, body = data.partition(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
    while len(body) < length:
        body += connection.recv(65536)
    return head + b"\r\n\r\n" + body


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


def http_answer(body: bytes, status: str = "200 OK", *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def json_answer(body: Any, status: str = "200 OK") -> bytes:
    return http_answer(json.dumps(body).encode(), status, "Content-Type: application/json")


#: The head of an answer that never ends, and one of its pieces.
ENDLESS = (b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n", b'{"data": [' + b" " * 2**20)


@contextlib.contextmanager
def serving_paths(answers: Mapping[str, bytes | Iterable[bytes]]) -> Iterator[str]:
    """Serve any number of requests, each with the answer to the longest beginning of its path.

    The last piece of an answer in pieces is sent until the client closes the connection.
    """

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError):
                path = read_request(self.request).split(b" ")[1].decode()
                answer = answers[max((key for key in answers if path.startswith(key)), key=len)]
                if isinstance(answer, bytes):
                    self.request.sendall(answer)
                    return
                *first, last = answer
                for piece in itertools.chain(first, itertools.repeat(last)):
                    self.request.sendall(piece)

    with serving_handler(Handler) as url:
        yield url
