"""Measure the load generator itself: the CPU time it uses for each event that it receives.

    python -m benchmarks.selfcheck

A second process plays the server: one event to every client each step, as an engine does, so each
event arrives by itself, which is the dearest case.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import socket
import statistics
import sys
import time
from collections.abc import Sequence

from benchmarks.driver import run
from benchmarks.load import bounded, counts
from benchmarks.plan import Address, Plan, Run
from benchmarks.stats import sample_of
from benchmarks.wire import Shape

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
    b"Cache-Control: no-cache\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    """Return the data as one chunk of the chunked encoding."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(content: str, **more: object) -> bytes:
    """Return one event of a streamed chat, of the size that real ones have."""
    body = {
        "choices": [{"finish_reason": None, "index": 0, "delta": {"content": content}}],
        "created": 1_700_000_000,
        "id": "chatcmpl-0123456789abcdef0123456789abcdef",
        "model": "benchmark",
        "system_fingerprint": "b1-0123456",
        "object": "chat.completion.chunk",
        **more,
    }
    return b"data: " + json.dumps(body).encode() + b"\n\n"


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


def play(listener: socket.socket, clients: int, events: int, step: float) -> None:
    """Serve that many clients one stream each, then end."""
    connections = [listener.accept()[0] for _ in range(clients)]
    for connection in connections:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        read_request(connection)
        connection.sendall(HEAD)
    data = chunk(event(" word"))
    for _ in range(events):
        for connection in connections:
            connection.sendall(data)
        time.sleep(step)
    usage = {"completion_tokens": events, "prompt_tokens": 1}
    last = chunk(event("", usage=usage)) + chunk(b"data: [DONE]\n\n") + chunk(b"")
    for connection in connections:
        connection.sendall(last)
        connection.close()


def measure(clients: int, events: int, step: float = 0.002) -> Run:
    """Run the generator against the played server. Both end before this returns."""
    with socket.create_server(("127.0.0.1", 0), backlog=clients) as listener:
        port = listener.getsockname()[1]
        arguments = (listener, clients, events, step)
        # Spawned, not forked: a fork of a process that has threads may hang.
        context = multiprocessing.get_context("spawn")
        process = context.Process(target=play, args=arguments, daemon=True)
        process.start()
        try:
            request = Shape(max_tokens=events).request("a few words")
            plans = [Plan(requests=[request])] * clients
            return run(Address("127.0.0.1", port), plans, timeout=60, max_time=60)
        finally:
            process.join(5)
            process.kill()
            process.join()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Returns 1 when an event was lost."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.selfcheck", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--clients", type=counts, default=[1, 8, 50])
    parser.add_argument("--events", type=bounded(1, 10_000), default=500, help="of each stream")
    parser.add_argument("--rounds", type=bounded(1, 100), default=3)
    options = parser.parse_args(argv)
    whole = True
    for clients in options.clients:
        runs = [measure(clients, options.events) for _ in range(options.rounds)]
        for result in runs:
            sample = sample_of(result, planned=clients, expected_tokens=options.events)
            expected = clients * (options.events + 2)  # with the usage and [DONE]
            if sample.failed or result.events != expected:
                whole = False
                print(f"{result.events} of {expected} events", *sample.errors, file=sys.stderr)
        cost = statistics.median(result.cpu / max(result.events, 1) * 1e6 for result in runs)
        print(f"{clients:4} clients: {cost:5.1f} us of CPU an event")
    return 0 if whole else 1


if __name__ == "__main__":
    sys.exit(main())
