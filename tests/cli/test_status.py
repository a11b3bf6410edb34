"""A server that tells its status to the program that has started it, and ends with that."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import attrs
import httpx
import pytest

from trioserve.children.frames import FrameReader
from trioserve.children.parent import VARIABLE, ParentSocket
from trioserve.children.reports import Failed, Loading, Ready, Report, Sleeping, decode
from trioserve.cli.progress import Reporter

R = TypeVar("R")


@attrs.define
class Started:
    """A server in a separate process, and its reports."""

    process: subprocess.Popen[bytes]
    connection: socket.socket
    reports: Iterator[Report]

    def until(self, kind: type[R]) -> R:
        """Read what it tells until it tells this."""
        return next(report for report in self.reports if isinstance(report, kind))


@contextmanager
def started(*argv: str) -> Iterator[Started]:
    ours, theirs = socket.socketpair()
    environ = {name: text for name, text in os.environ.items() if "LLAMA" not in name}
    process = subprocess.Popen(
        [sys.executable, "-m", "trioserve", "--port", "0", "-t", "1", *argv],
        stdin=theirs,
        stderr=subprocess.PIPE,
        env=environ | {VARIABLE: "1"},
    )
    theirs.close()
    with process, ours:
        try:
            yield Started(process, ours, reports_of(ours))
        finally:
            process.kill()


def reports_of(connection: socket.socket) -> Iterator[Report]:
    frames = FrameReader()
    while data := connection.recv(2**16):
        yield from map(decode, frames.feed(data))


@pytest.mark.system
def test_it_tells_that_it_loads_and_is_ready_and_logs_json_whatever_the_flags_say() -> None:
    with started("--alias", "mine", "--log-format", "pretty") as server:
        assert isinstance(next(server.reports), Loading)
        server.until(Ready)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stderr is not None
        events = [json.loads(line)["event"] for line in server.process.stderr]
        assert events.index("listening") < events.index("ready")
        assert server.process.wait(20) == 0


@pytest.mark.system
def test_it_tells_when_it_sleeps_and_wakes(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with started("--host", str(path), "--sleep-idle-seconds", "0.2") as server:
        server.until(Ready)
        assert next(server.reports) == Sleeping()
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
            answer = client.post("/completion", json={"prompt": "Once", "n_predict": 4})
            assert answer.json()["tokens_predicted"] == 4
            assert server.until(Ready) == Ready()
            assert next(server.reports) == Sleeping()
            assert client.get("/props").json()["is_sleeping"] is True
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


@pytest.mark.system
def test_it_tells_why_it_cannot_serve(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(100))
    for argv, code, part in (
        (["-m", "/no/such.gguf"], 1, "/no/such.gguf"),
        (["-m", str(broken)], 1, "broken.gguf"),
        (["--no-such-flag"], 2, "--no-such-flag"),
    ):
        with started(*argv) as server:
            assert part in server.until(Failed).message
            assert server.process.wait(20) == code


@pytest.mark.system
def test_it_does_not_outlive_its_parent_while_it_does_not_read() -> None:
    """The thread that waits for its end does not read what a router has sent."""
    with started() as server:
        server.until(Ready)
        server.connection.sendall(b"x" * 1000)
        assert server.process.poll() is None
        server.connection.close()
        assert server.process.wait(20) == 1


def test_the_progress_is_not_told_for_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("trioserve.cli.progress.monotonic", lambda: now)
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            status = Reporter(ParentSocket(theirs))
            for share in (0.1, 0.2, 0.3):
                status.progress(Loading(share))
            now += 0.2
            status.progress(Loading(0.4))
        assert list(reports_of(ours)) == [Loading(0.1), Loading(0.4)]


def test_without_a_listener_nothing_is_told() -> None:
    Reporter().tell(Ready())
    assert Reporter().parent is None
    ours, theirs = socket.socketpair()
    ours.close()
    with theirs:
        Reporter(ParentSocket(theirs)).tell(Ready())  # the listener has gone
