"""The start and the end of serving: mistakes, signals, the drain."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import structlog
import trio

from tests.support.command import Running, serving
from tests.support.http_server import serving_script
from trioserve import Config
from trioserve.chat.template.builtin import CHATML
from trioserve.cli.serving import check_reach, open_sockets, serve, tell_ready
from trioserve.testing import ScriptedBackend

pytestmark = pytest.mark.system

#: A request that runs until someone ends it.
ENDLESS = {"prompt": "Once upon a time", "stream": True, "ignore_eos": True, "temperature": 0.0}


def test_a_mistake_of_ours_ends_it_with_exit_code_1(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_args: object, **_kwargs: object) -> None:
        raise RuntimeError("unexpected")

    monkeypatch.setattr("trioserve.llama.load", broken)
    with structlog.testing.capture_logs() as lines:
        assert serve(Config(port=0)) == 1
    assert [line["event"] for line in lines if line["log_level"] == "error"] == ["the server broke"]


@pytest.mark.parametrize("switched_on", [{"tools": ("get_info",)}, {"ui_mcp_proxy": True}])
def test_tools_without_a_key_are_not_for_everybody(
    switched_on: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(Config(host="127.0.0.1,0.0.0.0", port=0, **switched_on)) == 1
    assert "set --api-key, or listen on 127.0.0.1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("host", "config"),
    [
        ("0.0.0.0", {}),
        ("0.0.0.0", {"tools": ("get_info",), "api_keys": ("k",)}),
        ("localhost", {"agent": True}),
        ("{tmp}/a.sock", {"agent": True}),
    ],
)
def test_tools_with_a_key_or_on_this_machine(
    host: str, config: dict[str, Any], tmp_path: Path
) -> None:
    made = Config(host=host.format(tmp=tmp_path), port=0, **config)
    with open_sockets(made) as listening:
        check_reach(made, listening)


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
        "POST /completion HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    async with await trio.open_tcp_stream(url.host, url.port or 0) as stream:
        await stream.send_all(head.encode() + body)
        events = Events(stream)
        await events.first()
        yield events


async def test_a_signal_ends_an_idle_server_with_exit_code_0() -> None:
    async with serving() as running:
        running.process.send_signal(signal.SIGINT)
        assert (await running.line("draining"))["signal"] == "SIGINT"
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
        streaming(running),  # the rest stays unread
    ):
        running.process.send_signal(signal.SIGTERM)
        assert await running.process.wait() == 0


@pytest.mark.parametrize(
    ("config", "backend", "advice"),
    [
        (
            Config(ctx_size=1024),
            ScriptedBackend(n_ctx=1024, n_ctx_seq=512, chat_template=CHATML),
            "A request may have 512 tokens, because --parallel 2 divides the context of 1024",
        ),
        (Config(), ScriptedBackend(chat_template=None), "no chat template"),
        (Config(ctx_size=8192), ScriptedBackend(chat_template=CHATML), ""),  # trained with fewer
        (Config(chat_template=CHATML), ScriptedBackend(chat_template=None), ""),
    ],
)
async def test_advice_at_the_start(config: Config, backend: ScriptedBackend, advice: str) -> None:
    options = {"ctx_size": config.ctx_size, "chat_template": config.chat_template}
    async with serving_script(backend, **options) as (_, service):
        with structlog.testing.capture_logs() as logged:
            tell_ready(service.server)
    assert [advice in line["event"] for line in logged[1:]] == [True] * bool(advice)


async def test_a_terminal_shows_notes_once_and_last_how_to_use_it() -> None:
    terminal, inside = pty.openpty()
    environ = {**os.environ, "LLAMA_ARG_DEFRAG_THOLD": "0.1", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "trioserve", "--port", "0", "-t", "1"]
    with trio.fail_after(60):
        process = await trio.lowlevel.open_process(command, stderr=inside, env=environ)
        os.close(inside)
        shown = ""
        while "Ctrl-C" not in shown:
            await trio.lowlevel.wait_readable(terminal)
            shown += os.read(terminal, 2**16).decode()
        process.terminate()
        assert await process.wait() == 0
        os.close(terminal)
    assert shown.count("LLAMA_ARG_DEFRAG_THOLD has no effect") == 1
    before, _, banner = shown.replace("\r", "").partition("\n\n")
    assert "the bundled model comes with trioserve" in before  # its process has logged that
    url = re.search(r"url=(\S+)", before)
    assert url is not None
    assert banner.split() == [
        *("page", url[1], "API", f"{url[1]}/v1", "model", "bundled", "stop", "Ctrl-C"),
    ]
