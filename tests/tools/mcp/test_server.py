"""When MCP servers are started and stopped, with a clock that stands still."""

from __future__ import annotations

from pathlib import Path

import trio
import trio.testing

from tests.support.mcp_servers import call, is_running, odd, opened, pids_in
from trioserve.tools.mcp.server import COOLDOWN_SECONDS, IDLE_SECONDS


async def _until_it_has_ended(pid: int, clock: trio.testing.MockClock) -> None:
    while is_running(pid):
        await trio.to_thread.run_sync(lambda: None)
        clock.jump(0.1)  # the time that a server has to end by itself


async def test_a_server_that_nobody_calls_is_stopped(
    mock_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    async with opened(a=odd("log", tmp_path / "pids")) as servers:
        await call(servers, "a_echo")
        mock_clock.jump(IDLE_SECONDS - 1)
        await call(servers, "a_echo")
        mock_clock.jump(IDLE_SECONDS - 1)
        await call(servers, "a_echo")
        _, calling = pids_in(tmp_path / "pids")
        assert is_running(calling)
        mock_clock.jump(IDLE_SECONDS + 1)
        await _until_it_has_ended(calling, mock_clock)
        await call(servers, "a_echo")
        assert len(pids_in(tmp_path / "pids")) == 3


async def test_a_call_just_when_it_is_stopped_starts_it_again(
    mock_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    async with opened(a=odd("log", tmp_path / "pids")) as servers:
        await call(servers, "a_echo")
        mock_clock.jump(IDLE_SECONDS)
        assert (await call(servers, "a_echo", text="x")).text == "x"
        assert len(pids_in(tmp_path / "pids")) == 3


async def test_a_start_that_fails_is_not_repeated_by_each_call(
    mock_clock: trio.testing.MockClock, tmp_path: Path
) -> None:
    program = tmp_path / "server"
    program.write_text(f'#!/bin/sh\necho >> {tmp_path}/starts\nexec "$@"\n')
    program.chmod(0o755)
    entry = odd()
    entry = {"command": str(program), "args": [entry["command"], *entry["args"]]}
    async with opened(a=entry) as servers:
        program.rename(tmp_path / "moved")
        for _ in range(3):
            assert "No such file" in (await call(servers, "a_echo")).answer["error"]
        (tmp_path / "moved").rename(program)
        assert "No such file" in (await call(servers, "a_echo")).answer["error"]
        mock_clock.jump(COOLDOWN_SECONDS)
        assert (await call(servers, "a_echo", text="x")).text == "x"
    assert (tmp_path / "starts").read_text() == "\n\n"  # once to list, and once to call
