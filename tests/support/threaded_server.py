"""A server of the standard library in a thread, for stand-ins that speak HTTP."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler
from typing import Any


class QuietHandler(BaseHTTPRequestHandler):
    """Answers with whole bodies, and logs nothing."""

    def send(self, status: int, data: bytes, headers: Mapping[str, str]) -> None:
        """Send an answer."""
        self.send_response(status)
        for name, text in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, text)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_args: Any) -> None:
        """Log nothing."""


class _Server(ThreadingHTTPServer):
    request_queue_size = 100


@contextmanager
def serving_handler(handler: type[BaseRequestHandler]) -> Iterator[str]:
    """Serve on a port of this machine; gives the address."""
    with _Server(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
