"""`trioserve ps`: what a running server says that it has."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from trioserve.cli.main import main

IN_MEMORY = {
    "models": [
        {"name": "org/a:Q8_0", "expires_at": "2318-01-01T00:00:00Z"},
        {"name": "d", "expires_at": "?"},
    ]
}
ROUTER = {
    "data": [
        {"id": "org/a:Q8_0", "status": {"value": "loaded"}, "meta": {"size": 3 * 2**30}},
        {"id": "b", "status": {"value": "unloaded"}},
        {"id": "c", "status": {"value": "unloaded", "failed": True, "exit_code": 1}},
        {"id": "d", "status": {"value": "sleeping"}, "meta": None},
    ]
}


class UnixServer(socketserver.UnixStreamServer):
    def get_request(self) -> tuple[Any, Any]:
        connection, _ = super().get_request()
        return connection, ("local", 0)


@contextmanager
def answering(
    body: Any, status: int = 200, *, path: Path | None = None, in_memory: Any = IN_MEMORY
) -> Iterator[tuple[str, list[Any]]]:
    """A server that gives each request this answer; yields its address and the requests."""
    requests: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            requests.append((self.path, self.headers.get("Authorization")))
            found = in_memory if self.path == "/api/ps" else body
            data = found if isinstance(found, bytes) else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server: socketserver.BaseServer
    if path is not None:
        server = UnixServer(str(path), Handler)
        address = str(path)
    else:
        server = HTTPServer(("127.0.0.1", 0), Handler)
        address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield address, requests
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def listed(capsys: pytest.CaptureFixture[str], *argv: str) -> list[str]:
    assert main(["ps", *argv]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def test_what_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    with answering(ROUTER) as (url, requests):
        assert [line.split() for line in listed(capsys, "--url", url)] == [
            ["NAME", "STATE", "SIZE", "SLEEPS"],
            ["org/a:Q8_0", "loaded", "3.0", "GiB", "never"],
            ["c", "failed"],
            ["d", "sleeping"],
        ]
        assert len(listed(capsys, f"--url={url}/", "--all")) == 5
    assert requests == [("/v1/models", None), ("/api/ps", None)] * 2


def test_when_it_sleeps(capsys: pytest.CaptureFixture[str]) -> None:
    moment = datetime.now(UTC) + timedelta(minutes=5, seconds=5)
    running = {"models": [{"name": "org/a:Q8_0", "expires_at": moment.isoformat()}]}
    with answering(ROUTER, in_memory=running) as (url, _):
        assert "  in 5 min" in listed(capsys, "--url", url)[1]
    with answering(ROUTER, in_memory={"error": {"message": "no such route"}}) as (url, _):
        assert listed(capsys, "--url", url)[1].endswith("3.0 GiB")


@pytest.mark.parametrize(
    ("in_memory", "state"),
    [
        (
            {"models": [{"name": "a", "expires_at": "2318-01-01T00:00:00Z"}]},
            "loaded 1.0 GiB never",
        ),
        ({"models": []}, "sleeping 1.0 GiB"),
        ({"error": "File Not Found"}, "loaded 1.0 GiB"),
    ],
)
def test_a_server_of_one_model(
    capsys: pytest.CaptureFixture[str], in_memory: Any, state: str
) -> None:
    alone = {"data": [{"id": "a", "meta": {"size": 2**30}}]}
    with answering(alone, in_memory=in_memory) as (address, _):
        assert listed(capsys, "--url", address)[1].split() == ["a", *state.split()]


def test_the_server_that_the_flags_describe(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with answering({"data": [{"id": "one", "meta": {"size": 5}}]}) as (url, requests):
        port = url.rpartition(":")[2]
        flags = ("--host", "0.0.0.0", "--port", port, "--api-prefix", "/llm")
        assert listed(capsys, *flags)[1].split() == ["one", "loaded", "5", "bytes"]
        monkeypatch.setenv("LLAMA_API_KEY", "secret,other")
        monkeypatch.setenv("LLAMA_ARG_PORT", port)
        listed(capsys)
    assert requests[::2] == [("/llm/v1/models", None), ("/v1/models", "Bearer secret")]


def test_a_unix_socket(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with answering(ROUTER, path=tmp_path / "s.sock") as (address, _):
        assert len(listed(capsys, "--host", address)) == 4


def complaint(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 1) -> str:
    assert main(["ps", *argv]) == code
    out, err = capsys.readouterr()
    assert out == ""
    return err


def test_nobody_answers(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with answering({}) as (url, _):
        pass
    assert f"No server answers at {url}: " in complaint(capsys, "--url", url)
    missing = str(tmp_path / "none.sock")
    assert f"No server answers at {missing}: " in complaint(capsys, "--host", missing)


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["--url"], "--url needs a value"),
        (["--url", "ftp://x"], "--url must be an address such as http://127.0.0.1:8080, not 'ftp"),
        (["--url", "http://x:99999"], "--url: 'http://x:99999' has no valid port"),
        (["--url", "http://["], "http://["),
        (["--url", "http://a/\x1b[2J"], "http://a"),
    ],
)
def test_addresses_that_cannot_be(
    capsys: pytest.CaptureFixture[str], argv: list[str], problem: str
) -> None:
    assert problem in complaint(capsys, *argv, code=2)
