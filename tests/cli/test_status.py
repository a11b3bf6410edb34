"""A server that tells its status on a descriptor, and ends with whoever holds its lifeline."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from trioserve.cli.progress import StatusPipe, take_status
from trioserve.errors import ConfigError


@attrs.define
class Started:
    """A server in a process of its own, and what it tells."""

    process: subprocess.Popen[bytes]
    reports: Iterator[dict[str, Any]]

    def until(self, state: str) -> dict[str, Any]:
        """Read what it tells until it tells this state."""
        return next(report for report in self.reports if report["state"] == state)


@contextmanager
def started(*argv: str) -> Iterator[Started]:
    ours, theirs = os.pipe()
    environ = {name: text for name, text in os.environ.items() if "LLAMA" not in name}
    environ |= {"TRIOSERVE_STATUS_FD": str(theirs), "TRIOSERVE_LIFELINE": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "trioserve", "--port", "0", "-t", "1", *argv],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[theirs],
        env=environ,
    )
    os.close(theirs)
    with process, os.fdopen(ours) as lines:
        try:
            yield Started(process, map(json.loads, lines))
        finally:
            process.kill()


@pytest.mark.system
def test_it_tells_that_it_loads_and_that_it_is_ready() -> None:
    with started("--alias", "mine") as server:
        assert next(server.reports)["state"] == "loading"
        info = server.until("ready")["info"]
        assert (info["id"], info["object"]) == ("mine", "model")
        assert info["meta"]["n_ctx"] > 0
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


@pytest.mark.system
def test_it_tells_when_it_sleeps_and_wakes(tmp_path: Path) -> None:
    path = tmp_path / "a.sock"
    with started("--host", str(path), "--sleep-idle-seconds", "0.2") as server:
        server.until("ready")
        assert next(server.reports) == {"state": "sleeping"}
        transport = httpx.HTTPTransport(uds=str(path))
        with httpx.Client(transport=transport, base_url="http://localhost", timeout=60) as client:
            answer = client.post("/completion", json={"prompt": "Once", "n_predict": 4})
            assert answer.json()["tokens_predicted"] == 4
            assert server.until("ready") == {"state": "ready"}
            assert next(server.reports) == {"state": "sleeping"}
            assert client.get("/props").json()["is_sleeping"] is True
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


@pytest.mark.system
def test_it_logs_json_whatever_the_flags_say() -> None:
    with started("--log-format", "pretty") as server:
        server.until("ready")
        server.process.send_signal(signal.SIGTERM)
        assert server.process.stderr is not None
        events = [json.loads(line)["event"] for line in server.process.stderr]
        assert events.index("listening") < events.index("ready")


@pytest.mark.system
def test_it_ends_with_its_lifeline() -> None:
    with started() as server:
        server.until("ready")
        assert server.process.stdin is not None
        server.process.stdin.close()
        assert server.process.wait(20) == 1


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
            assert part in server.until("failed")["message"]
            assert server.process.wait(20) == code


def test_what_is_no_descriptor_is_an_error() -> None:
    for text in ("x", "1000000"):
        with pytest.raises(ConfigError, match="is not an open descriptor"):
            take_status({"TRIOSERVE_STATUS_FD": text})


def test_the_variables_are_taken_out_of_the_environment() -> None:
    ours, theirs = os.pipe()
    environ = {"TRIOSERVE_STATUS_FD": str(theirs), "HOME": "/"}
    with os.fdopen(ours) as lines, os.fdopen(theirs, "wb"):
        status = take_status(environ)
        assert environ == {"HOME": "/"}
        assert status.is_open
        status.tell("loading", progress=0.5)
        assert json.loads(lines.readline()) == {"state": "loading", "progress": 0.5}


def test_the_progress_is_not_told_for_each_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("trioserve.cli.progress.monotonic", lambda: now)
    ours, theirs = os.pipe()
    with os.fdopen(ours) as lines:
        with os.fdopen(theirs, "wb"):
            status = StatusPipe(theirs)
            for share in (0.1, 0.2, 0.3):
                status.progress(share)
            now += 0.2
            status.progress(0.4)
        assert [json.loads(line)["progress"] for line in lines] == [0.1, 0.4]


def test_without_a_listener_nothing_is_told() -> None:
    StatusPipe().tell("ready")
    ours, theirs = os.pipe()
    os.close(ours)
    with os.fdopen(theirs, "wb"):
        StatusPipe(theirs).tell("ready")  # whoever listened has gone
