"""`trioserve mcp`, as a program that another one starts."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
from mcp import Client, StdioServerParameters
from mcp.client.stdio import stdio_client
from mcp.shared.exceptions import MCPError

from tests.support.http_server import serving_script, slots_in_use
from tests.support.processes import all_processes, parent_of
from tests.support.scripts import answering, endless
from tests.support.waiting import patiently
from trioserve.cli.main import main

pytestmark = pytest.mark.system

COMMAND = [sys.executable, "-m", "trioserve", "mcp"]


def children_of(pid: int) -> set[int]:
    """Its children, and theirs."""
    found = set()
    for child in all_processes():
        if parent_of(child) == pid:
            found |= {child} | children_of(child)
    return found


class Wire:
    """A client by hand, which sees all that comes."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self.lines: list[Any] = []
        self._buffer = b""

    async def say(self, method: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        message = {"jsonrpc": "2.0", "method": method, **fields}
        await self.process.stdin.send_all(json.dumps(message).encode() + b"\n")

    async def hear(self, number: int) -> dict[str, Any]:
        """Wait for the answer to a request."""
        assert self.process.stdout is not None
        while True:
            *lines, self._buffer = self._buffer.split(b"\n")
            self.lines += map(json.loads, lines)
            for one in self.lines:
                if one.get("id") == number:
                    return one["result"]  # type: ignore[no-any-return]
            data = await self.process.stdout.receive_some()
            assert data
            self._buffer += data

    async def begin(self) -> None:
        await self.say(
            "initialize",
            id=0,
            params={
                "protocolVersion": "2025-06-18",
                "capabilities": {},
                "clientInfo": {"name": "test", "version": "1"},
            },
        )
        assert (await self.hear(0))["serverInfo"]["name"] == "trioserve"
        await self.say("notifications/initialized")


@asynccontextmanager
async def started(*argv: str) -> AsyncIterator[Wire]:
    with patiently():
        process = await trio.lowlevel.open_process(
            [*COMMAND, *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=None
        )
        try:
            wire = Wire(process)
            await wire.begin()
            yield wire
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


async def test_a_model_of_its_own_and_the_end_of_its_input() -> None:
    async with started("-t", "1", "--log-level", "off") as wire:
        call = {"name": "chat", "arguments": {"prompt": "Say hello", "max_tokens": 5}}
        for number in (1, 2):
            await wire.say("tools/call", id=number, params=call)
        for number in (1, 2):
            assert (await wire.hear(number))["structuredContent"]["model"] == "bundled"
        assert children_of(wire.process.pid)
        assert wire.process.stdin is not None
        with patiently():
            children = children_of(wire.process.pid)
            await wire.process.stdin.aclose()
            assert await wire.process.wait() == 0
            while any(Path(f"/proc/{pid}").exists() for pid in children):
                await trio.sleep(0.01)


async def test_a_call_that_is_cancelled_and_a_signal_while_another_runs() -> None:
    async with serving_script(endless()) as (url, service), started("--url", url) as wire:
        call = {"name": "chat", "arguments": {"prompt": "Hi"}}
        await wire.say("tools/call", id=1, params=call)
        while not await slots_in_use(service):
            await trio.sleep(0.01)
        await wire.say("notifications/cancelled", params={"requestId": 1})
        while await slots_in_use(service):
            await trio.sleep(0.01)
        await wire.say("tools/call", id=2, params=call)
        while not await slots_in_use(service):
            await trio.sleep(0.01)
        wire.process.send_signal(signal.SIGTERM)
        with patiently():
            assert await wire.process.wait() == 0
        while await slots_in_use(service):
            await trio.sleep(0.01)
        assert all(one.get("id") != 1 for one in wire.lines)


async def test_the_official_client_starts_it() -> None:
    async with serving_script(answering("Hello!"), api_keys=("secret",)) as (url, _):
        parameters = StdioServerParameters(
            command=COMMAND[0],
            args=[*COMMAND[1:], "--url", url, "--api-key", "secret"],
            env=dict(os.environ),
        )
        with patiently():
            async with Client(stdio_client(parameters)) as client:
                result = await client.call_tool("chat", {"prompt": "Hi"})
    assert result.structured_content is not None
    assert result.structured_content["text"] == "Hello!"


async def test_over_http_until_a_signal_comes() -> None:
    async with serving_script(endless()) as (url, service):
        process = await trio.lowlevel.open_process(
            [*COMMAND, "--http", "0", "--url", url], stderr=subprocess.PIPE
        )
        try:
            with patiently():
                assert process.stderr is not None
                log = b""
                while (found := re.search(rb"http://127[^\s\"]+/mcp", log)) is None:
                    data = await process.stderr.receive_some()
                    assert data, log
                    log += data
                async with Client(found[0].decode()) as client, trio.open_nursery() as nursery:

                    async def ask() -> None:
                        with pytest.raises(MCPError):
                            await client.call_tool("chat", {"prompt": "Hi"})

                    nursery.start_soon(ask)
                    while not await slots_in_use(service):
                        await trio.sleep(0.01)
                    process.send_signal(signal.SIGINT)
                    assert await process.wait() == 0
                while await slots_in_use(service):
                    await trio.sleep(0.01)
                async for data in process.stderr:
                    log += data
            assert b"Traceback" not in log, log.decode()
        finally:
            process.kill()
            with trio.CancelScope(shield=True):
                await process.wait()


@pytest.mark.parametrize(
    ("argv", "code", "told"),
    [
        (("--http", "192.0.2.1:1"), 2, "cannot listen on 192.0.2.1:1"),
        (("--http",), 2, "--http needs a value"),
        (("--url", "ftp://example.com"), 2, "--url must be an address"),
        (("--url",), 2, "--url needs a value"),
        (("--no-such-flag",), 2, "is not a flag"),
        (("model.gguf",), 2, "mcp takes no word but login"),
        (("-m", "no-such-model.gguf"), 1, "no-such-model.gguf cannot be read"),
        (("-m", __file__), 1, "not a GGUF file"),
    ],
)
def test_flags_that_are_wrong(
    argv: tuple[str, ...], code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["mcp", *argv]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err


def test_without_the_package(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "trioserve.mcp_server.stdio", raising=False)
    monkeypatch.setitem(sys.modules, "mcp.shared.message", None)
    assert main(["mcp"]) == 2
    assert "install trioserve with its extra mcp" in capsys.readouterr().err


def test_a_message_that_is_far_too_long(tmp_path: Path) -> None:
    path = tmp_path / "zeros"
    with path.open("wb") as file:
        file.truncate(65 * 2**20)
    with path.open("rb") as file:
        ended = subprocess.run(COMMAND, stdin=file, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, b"")
    assert b"more than 67,108,864 bytes" in ended.stderr.splitlines()[-1]
    assert b"Traceback" not in ended.stderr
