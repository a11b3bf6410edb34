"""Kills servers while they store responses and run a batch, and checks what they have stored.

Run as ``python -m tests.support.killed_servers FOLDER KILLS``. Prints the number of kills, of the
responses that were acknowledged, and of the lines that were answered.
"""

from __future__ import annotations

import http.client
import json
import os
import random
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import hypercorn.trio
import trio

from tests.support.http_server import hypercorn_config
from tests.support.scripts import answering
from trioserve.app import create_app
from trioserve.config import Config
from trioserve.store.database import problems
from trioserve.testing import scripted

#: The longest that a server lives after it is ready, in seconds.
LIFE = 0.3

N_LINES_A_KILL = 25
_READY = 60.0


def serve(store: Path, listening: socket.socket) -> None:
    """Serve until the process is killed."""
    backend = answering(lambda prompt: "Hello", n_slots=4)
    config = Config(store=str(store), stream_interval_ms=0, log_level="off")
    app = create_app(config, load=scripted(backend))
    made = hypercorn_config()
    made.bind = [f"fd://{listening.fileno()}"]
    trio.run(partial(hypercorn.trio.serve, app, made))


def _end_with(lifeline: int) -> None:
    """End this process with the one that holds the other end of a pipe."""
    os.read(lifeline, 1)
    os._exit(1)


@contextmanager
def server(store: Path) -> Iterator[tuple[Client, Callable[[float], None]]]:
    """Run a server in a process for a block, which ends with SIGKILL.

    Gives a client, and a function that kills the server some seconds later in the block.
    """
    listening = socket.create_server(("127.0.0.1", 0))
    lifeline, held = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(held)
        threading.Thread(target=_end_with, args=(lifeline,), daemon=True).start()
        try:
            serve(store, listening)
        finally:
            os._exit(1)
    client = Client(listening.getsockname()[1])
    listening.close()
    os.close(lifeline)
    timers: list[threading.Timer] = []

    def kill_in(seconds: float) -> None:
        timers.append(threading.Timer(seconds, os.kill, (pid, signal.SIGKILL)))
        timers[0].start()

    try:
        client.until_ready()
        yield client, kill_in
    finally:
        for timer in timers:
            timer.join()
        os.kill(pid, signal.SIGKILL)
        os.close(held)
        _, status = os.waitpid(pid, 0)
        assert os.WIFSIGNALED(status), "the server has ended by itself"


class Client:
    """Sends requests to a server, each over a new connection."""

    def __init__(self, port: int) -> None:
        self._port = port

    def ask(
        self, method: str, path: str, body: bytes | None = None, kind: str = "application/json"
    ) -> tuple[int, bytes]:
        """Send a request. Raises OSError or HTTPException: the server is gone."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_READY)
        try:
            connection.request(method, path, body, {"Content-Type": kind})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def json(self, method: str, path: str, **fields: Any) -> Any:
        """Send JSON, and read the JSON of an answer that must be good."""
        body = json.dumps(fields).encode() if fields else None
        status, data = self.ask(method, path, body)
        assert status == 200, (path, status, data)
        return json.loads(data)

    def until_ready(self) -> None:
        limit = time.monotonic() + _READY
        while True:
            with suppress(OSError, http.client.HTTPException):
                if self.ask("GET", "/health")[0] == 200:
                    return
            assert time.monotonic() < limit, "the server does not start"
            time.sleep(0.01)


def begin_batch(client: Client, n_lines: int) -> str:
    lines = b"\n".join(
        json.dumps(
            {
                "custom_id": str(n),
                "url": "/v1/chat/completions",
                "body": {"messages": [{"role": "user", "content": f"Question {n}"}]},
            }
        ).encode()
        for n in range(n_lines)
    )
    form = (
        b'--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--x\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n'
        + lines
        + b"\r\n--x--\r\n"
    )
    status, data = client.ask("POST", "/v1/files", form, "multipart/form-data; boundary=x")
    assert status == 200, data
    wanted = {"input_file_id": json.loads(data)["id"], "endpoint": "/v1/chat/completions"}
    return str(client.json("POST", "/v1/batches", **wanted)["id"])


def store_one(client: Client, acknowledged: list[dict[str, Any]]) -> None:
    """Have a response stored that continues the last one, until the context is full of them."""
    previous = acknowledged[-1]["id"] if len(acknowledged) % 20 else None
    fields = {"input": "Hi", "store": True, "previous_response_id": previous}
    acknowledged.append(client.json("POST", "/v1/responses", **fields))


def main(folder: Path, n_kills: int) -> None:
    rng = random.Random(n_kills)
    store = folder / "a.db"
    n_lines = N_LINES_A_KILL * n_kills
    with server(store) as (client, _):
        batch = begin_batch(client, n_lines)
    acknowledged: list[dict[str, Any]] = []
    n_done = 0
    for kill in range(n_kills):
        with server(store) as (client, kill_in):
            for response in rng.sample(acknowledged, min(3, len(acknowledged))):
                assert client.json("GET", f"/v1/responses/{response['id']}") == response
            counts = client.json("GET", f"/v1/batches/{batch}")["request_counts"]
            assert counts["completed"] >= n_done, "answers are lost"
            n_done = counts["completed"]
            store_one(client, acknowledged)
            kill_in(rng.uniform(0, LIFE))
            with suppress(OSError, http.client.HTTPException):
                while True:
                    store_one(client, acknowledged)
        if kill % 10 == 9 or kill == n_kills - 1:
            assert problems(str(store)) == []
    with server(store) as (client, _):
        for response in acknowledged:
            assert client.json("GET", f"/v1/responses/{response['id']}") == response
        while (found := client.json("GET", f"/v1/batches/{batch}"))["status"] == "in_progress":
            time.sleep(0.05)
        assert found["status"] == "completed", found
        _, output = client.ask("GET", f"/v1/files/{found['output_file_id']}/content")
    ids = [json.loads(line)["custom_id"] for line in output.splitlines()]
    assert ids == [str(n) for n in range(n_lines)], "a line is missing, or is there twice"
    assert problems(str(store)) == []
    print(n_kills, len(acknowledged), len(ids))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
