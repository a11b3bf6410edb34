"""The command: what it says when it cannot serve, and how it ends."""

from __future__ import annotations

import io
import json
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import trio

from tests.support.command import Running, Terminal, run, serving
from trioserve import Config
from trioserve.cli import main as cli
from trioserve.cli.main import LoadReport, open_socket
from trioserve.models import BUNDLED

#: A request that runs until someone ends it.
ENDLESS = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "temperature": 0.0}


# -- what is said at once


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "-m, --model TEXT" in text
    assert "LLAMA_ARG_PORT" in text


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert "llama-cpp-python 0." in capsys.readouterr().out


def test_an_unknown_flag_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["--prot", "1"]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == "trioserve: --prot is not a flag of trioserve; did you mean --port?\n"


def test_a_missing_model(tmp_path: Path) -> None:
    path = tmp_path / "missing.gguf"
    result = run("-m", str(path))
    assert result.returncode == 1
    assert result.stderr == f"trioserve: The model file {path} does not exist.\n"


def test_a_file_that_is_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "text.gguf"
    path.write_text("no tensors here, and quite some text to say so", encoding="utf-8")
    result = run("-m", str(path))
    assert result.returncode == 1
    assert result.stderr.startswith(f"trioserve: The model file {path} is not a GGUF file")
    assert result.stderr.count("\n") == 1


def test_a_model_that_is_cut_short(tmp_path: Path) -> None:
    path = tmp_path / "half.gguf"
    path.write_bytes(BUNDLED.read_bytes()[: BUNDLED.stat().st_size // 2])
    result = run("-m", str(path), "--port", "0")
    assert result.returncode == 1
    assert "Traceback" not in result.stderr
    said = [json.loads(line) for line in result.stderr.splitlines()]
    about = [line for line in said if f"The model file {path} is cut short" in line["event"]]
    assert len(about) == 1
    assert about[0]["level"] == "error"


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--port", str(port))
    assert result.returncode == 1
    assert result.stderr == (
        f"trioserve: cannot listen on 127.0.0.1:{port}: Address already in use\n"
    )


def test_a_host_that_nobody_knows() -> None:
    result = run("--host", "no.such.host.invalid", "--port", "0")
    assert result.returncode == 1
    assert result.stderr.startswith("trioserve: cannot listen on no.such.host.invalid:0: ")


def test_a_socket_on_any_free_port() -> None:
    with open_socket("127.0.0.1", 0) as opened:
        assert cli._url(opened) == f"http://127.0.0.1:{opened.getsockname()[1]}"


@pytest.mark.skipif(not socket.has_ipv6, reason="no IPv6")
def test_the_address_of_ipv6_is_in_brackets() -> None:
    try:
        opened = open_socket("::1", 0)
    except OSError:
        pytest.skip("no IPv6 on this machine")
    with opened:
        assert cli._url(opened).startswith("http://[::1]:")


def test_a_mistake_of_ours_ends_it_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("nobody expected this")

    monkeypatch.setattr("trioserve.llama.load", broken)
    with structlog.testing.capture_logs() as lines:
        assert cli.serve(Config(port=0)) == 1
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["the server broke"]


# -- loading is reported


def test_progress_on_a_terminal_is_one_line_that_changes() -> None:
    stream = Terminal()
    report = LoadReport("x.gguf", stream, patience=0)
    report(0.25)
    report(1.0)
    report.end()
    assert stream.getvalue() == "\rLoading x.gguf:  25%\rLoading x.gguf: 100%\r\x1b[K"


def test_progress_elsewhere_is_a_log_line_each_quarter() -> None:
    with structlog.testing.capture_logs() as lines:
        report = LoadReport("x.gguf", io.StringIO(), patience=0)
        for share in (0.1, 0.3, 0.4, 0.6, 1.0):
            report(share)
        report.end()
    assert [line["percent"] for line in lines] == [25, 50, 100]


def test_a_model_that_loads_quickly_is_not_reported() -> None:
    stream = Terminal()
    report = LoadReport("x.gguf", stream, patience=60)
    report(1.0)
    report.end()
    assert stream.getvalue() == ""


# -- serving and ending


class Events:
    """A completion as it streams in, over a plain socket."""

    def __init__(self, stream: trio.SocketStream) -> None:
        self._stream = stream
        self._unread = b""

    async def first(self) -> None:
        """Wait until output has come."""
        while b"data: " not in self._unread:
            self._unread += await self._stream.receive_some()

    async def rest(self) -> list[dict[str, Any]]:
        """Read to the end of the connection; returns all events."""
        async for data in self._stream:
            self._unread += data
        lines = self._unread.decode().splitlines()
        return [json.loads(line.partition(": ")[2]) for line in lines if line.startswith("data: ")]


@asynccontextmanager
async def streaming(running: Running, **fields: object) -> AsyncIterator[Events]:
    """An endless completion, once its first output is there."""
    url = httpx.URL(running.url)
    body = json.dumps(ENDLESS | fields).encode()
    head = (
        "POST /completion HTTP/1.1\r\nHost: here\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    async with await trio.open_tcp_stream(url.host, url.port or 0) as stream:
        await stream.send_all(head.encode() + body)
        events = Events(stream)
        await events.first()
        yield events


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_ends_an_idle_server_with_exit_code_0(number: signal.Signals) -> None:
    async with serving() as running:
        running.process.send_signal(number)
        assert (await running.line("draining"))["signal"] == number.name
        assert await running.process.wait() == 0


async def test_a_signal_drains() -> None:
    async with (
        serving("-c", "32768", "-np", "2", "--drain-timeout", "1") as running,
        streaming(running) as events,
    ):
        running.process.send_signal(signal.SIGTERM)
        await running.line("draining")
        async with running.client() as client:
            assert (await client.get("/health")).status_code == 503
            refused = await client.post("/completion", json={"prompt": "Hi", "n_predict": 1})
            assert refused.status_code == 503
            assert refused.json()["error"]["type"] == "unavailable_error"
        got = await events.rest()
        assert len(got) > 2, "the stream goes on while the server drains"
        assert got[-1]["error"]["code"] == 503
        assert await running.process.wait() == 0


async def test_a_request_that_ends_within_the_drain_ends_well() -> None:
    async with (
        serving("-c", "32768", "--drain-timeout", "60") as running,
        streaming(running, n_predict=200) as events,
    ):
        running.process.send_signal(signal.SIGTERM)
        got = await events.rest()
        assert got[-1]["stop_type"] == "limit"
        assert await running.process.wait() == 0


async def test_a_second_signal_ends_it_at_once() -> None:
    async with (
        serving("-c", "32768", "--drain-timeout", "600") as running,
        streaming(running),
    ):
        running.process.send_signal(signal.SIGTERM)
        await running.line("draining")
        running.process.send_signal(signal.SIGTERM)
        assert await running.process.wait() == -signal.SIGTERM


async def test_a_client_that_does_not_read_cannot_keep_it_from_ending() -> None:
    async with (
        serving("-c", "32768", "--drain-timeout", "0.2", "--unread-tokens", "100000") as running,
        streaming(running),  # and nobody reads the rest
    ):
        running.process.send_signal(signal.SIGTERM)
        assert await running.process.wait() == 0
