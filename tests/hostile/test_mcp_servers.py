"""MCP servers that attack: they lose their tools, and nothing else is lost."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
import trio

from tests.support import hostile_http_mcp, hostile_mcp_server
from tests.support.loop_probe import probing
from tests.support.mcp_servers import call, odd, opened
from tests.support.process_memory import resident
from trioserve.tools.mcp.tools import McpServers

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]

ATTACKS = (
    "pages", "descriptions", "schemas", "required", "nested", "dialects", "names", "requests",
    "long ids", "long methods", "questions", "values", "changes", "numbers", "ends", "introduction",
)  # fmt: skip

HTTP_ATTACKS = (
    "requests", "values", "values of events", "numbers", "notifications", "pieces",
    "reconnections", "ends", "answers", "a redirection", "farewell", "no end", "no end of an event",
)  # fmt: skip

#: Bytes that a server may cost, with what its messages take while they are read.
_MAX_MEMORY = 150 * 2**20

#: Processor seconds of all threads in which the event loop has no turn.
_MAX_STALL = 0.5

#: Characters of the log.
_MAX_LOG = 2**16


async def under_attack(bad: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    """Call a server that attacks, and another one, and look at what that costs."""
    async with opened(good=odd()) as servers:
        await call(servers, "good_echo", text="x")  # what is imported only once
    before = resident()
    async with (
        probing() as probe,
        opened(bad={**bad, "timeout_ms": 3000}, good=odd()) as servers,
    ):
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(_call_if_listed, servers)
                assert (await call(servers, "good_echo", text="x")).text == "x"
                await trio.sleep(0.5)
        listed = [tool.info.definition for tool in servers.tools.values()]
        grown = resident() - before
    log = capsys.readouterr()
    print(f"{grown / 2**20:.0f} MiB, stalled for {probe.stalled:.3f} s")
    print(log.out + log.err)
    assert grown < _MAX_MEMORY
    assert probe.stalled < _MAX_STALL
    assert len(json.dumps(listed)) < 3 * 2**20
    assert "Traceback" not in log.out + log.err
    assert len(log.out + log.err) < _MAX_LOG


async def _call_if_listed(servers: McpServers) -> None:
    if "bad_echo" in servers.tools:
        await call(servers, "bad_echo")


@pytest.mark.parametrize("attack", ATTACKS)
async def test_a_program_that_attacks(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["-S", hostile_mcp_server.__file__, attack]
    await under_attack({"command": sys.executable, "args": arguments}, capsys)


@asynccontextmanager
async def attacking(attack: str) -> AsyncIterator[str]:
    """Run a server that attacks; gives its address."""
    argv = [sys.executable, "-S", hostile_http_mcp.__file__, attack]
    async with trio.open_nursery() as nursery:
        run = partial(trio.run_process, argv, stdout=subprocess.PIPE, check=False)
        process = await nursery.start(run)
        port = int(await process.stdout.receive_some(100))
        yield f"http://127.0.0.1:{port}/mcp"
        process.kill()


@pytest.mark.parametrize("attack", HTTP_ATTACKS)
@pytest.mark.filterwarnings(
    "ignore:Async generator 'httpcore2:ResourceWarning",
    "ignore:Async generator 'httpx2:ResourceWarning",
)
async def test_an_address_that_attacks(attack: str, capsys: pytest.CaptureFixture[str]) -> None:
    async with attacking(attack) as url:
        await under_attack({"url": url}, capsys)
