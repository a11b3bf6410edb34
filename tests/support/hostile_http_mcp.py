"""An MCP server at an address that attacks its client. It only needs Python, and prints its port.

Its first argument names the attack, which begins with the first call of its tool.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

MODE = sys.argv[1] if len(sys.argv) > 1 else ""
EVENTS, JSON = "text/event-stream", "application/json"
MANY = b"[" + b"[]," * 2_700_000 + b"[]]"


class Handler(BaseHTTPRequestHandler):
    """Answers as a server does, except for calls."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def begin(self, status: int, content_type: str = EVENTS, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Connection", "close")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.close_connection = True

    def event(self, data: bytes, before: bytes = b"") -> None:
        self.wfile.write(b"%bdata: %b\n\n" % (before, data))

    def say(self, **message: Any) -> None:
        self.event(json.dumps({"jsonrpc": "2.0", **message}).encode())

    def do_GET(self) -> None:
        if MODE == "reconnections" and self.headers.get("Last-Event-ID"):
            self.begin(200)
            self.wfile.write(b"id: 1\nretry: 0\ndata:\n\n")
            return
        self.begin(405)

    def do_DELETE(self) -> None:
        self.begin(200, JSON)
        while MODE == "farewell":
            self.wfile.write(b" " * 2**16)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        message = json.loads(body)
        match message.get("method"):
            case "initialize":
                self.answer(message, {
                    "protocolVersion": "2025-06-18",
                    "capabilities": {},
                    "serverInfo": {"name": "hostile", "version": "1"},
                })  # fmt: skip
            case "tools/list":
                tools = [{"name": "echo", "inputSchema": {"type": "object"}}]
                self.answer(message, {"tools": tools})
            case "tools/call":
                self.attack(message["id"])
            case "ping":
                self.answer(message, {})
            case None:  # an answer to what it asked
                threading.Event().wait()
            case _:
                self.begin(202, JSON)

    def answer(self, message: Any, result: Any) -> None:
        data = json.dumps({"jsonrpc": "2.0", "id": message["id"], "result": result}).encode()
        self.begin(200, JSON, Mcp_Session_Id="1", Content_Length=str(len(data)))
        self.wfile.write(data)

    def attack(self, id: int) -> None:
        if MODE == "a redirection":
            self.begin(307, JSON, Location="/elsewhere")
        elif MODE == "values":
            self.begin(200, JSON)
            self.wfile.write(b'{"jsonrpc":"2.0","id":%d,"result":%b}' % (id, MANY))
            return
        elif MODE == "no end":
            self.begin(200, JSON)
        else:
            self.begin(200)
        n = 0
        while True:
            n += 1
            match MODE:
                case "requests":
                    self.say(id=f"{n}" + "x" * 200, method="x" * 200)
                case "values of events":
                    self.event(b'{"jsonrpc":"2.0","id":%d,"result":%b}' % (id, MANY))
                case "numbers":
                    params = {"progressToken": id, "progress": 10**400}
                    self.say(method="notifications/progress", params=params)
                    self.say(id="9" * 5000, method="ping")
                case "notifications":
                    params = {"level": "info", "data": "x" * 1000}
                    self.say(method="notifications/message", params=params)
                    self.say(method="notifications/progress", params={"progressToken": {}})
                case "pieces":
                    self.wfile.write(b"x")
                    time.sleep(0.00001)
                case "reconnections":
                    self.wfile.write(b"id: 1\nretry: 0\ndata:\n\n")
                    return
                case "ends":
                    self.say(method="notifications/message", params={"level": "info", "data": n})
                    if n == 1000:
                        return
                case "answers":  # to questions that were not asked
                    self.event(b'{"jsonrpc":"2.0","id":%d,"result":{"a":"%b"}}' % (9, b"x" * 2**20))
                case _:
                    self.wfile.write(b" " * 2**16)


class Server(ThreadingHTTPServer):
    """Threads that do not keep the program from ending."""

    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass  # the client has left


def main() -> None:
    server = Server(("127.0.0.1", 0), Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
