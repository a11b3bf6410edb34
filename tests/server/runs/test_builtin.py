"""Runs with the built-in tools and with commands: what is written, and that nothing is left."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from tests.support import waiting
from tests.support.processes import all_processes, words
from tests.support.scripted_server import assert_at_rest, serve
from tests.support.scripts import HI
from tests.support.tool_calls import calls, saying
from trioserve import (
    AgentRun,
    ApprovalNeeded,
    RunEvent,
    Server,
    ToolOutput,
    ToolReturned,
    ToolStarted,
)

pytestmark = pytest.mark.system

#: Runs that are left at random. Beyond what the tests do: ``N_RUNS=500``.
N_RUNS = int(os.environ.get("N_RUNS", "12"))


def shell(command: str) -> str:
    return calls(("exec_shell_command", {"command": command}))


@asynccontextmanager
async def serving(folder: Path, answers: Iterable[str], **config: object) -> AsyncIterator[Server]:
    backend, _ = saying(answers, n_ctx=2**17)
    async with serve(backend, tools=("all",), tools_dir=(str(folder),), **config) as server:
        yield server


def commands(mark: str) -> list[str]:
    """The command lines of processes that have a text in them."""
    lines = (" ".join(words(pid, "cmdline")) for pid in all_processes())
    return [line for line in lines if mark in line]


async def until(run: AgentRun, *kinds: type) -> RunEvent:
    async for event in run:
        if isinstance(event, kinds):
            return event
    raise AssertionError("it did not come")


async def test_nothing_is_written_before_somebody_agrees(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("old\n")
    write = calls(("write_file", {"path": "a.txt", "content": "new\n"}))
    async with (
        serving(tmp_path, [write, write, "Done."]) as server,
        server.stream_run(HI, ["write_file"], cwd=str(tmp_path)) as run,
    ):
        asked = await until(run, ApprovalNeeded)
        assert isinstance(asked, ApprovalNeeded)
        assert asked.preview is not None
        assert "-old\n+new\n" in asked.preview
        run.deny(asked.call.id)
        asked = await until(run, ApprovalNeeded)
        assert path.read_text() == "old\n"
        run.approve(asked.call.id)
        returned = await until(run, ToolReturned)
        assert isinstance(returned, ToolReturned)
        assert returned.diff == asked.preview
        assert (await run.read()).message.content == "Done."
    assert path.read_text() == "new\n"


async def end_commands(server: Server, how: str, mark: str) -> None:
    """Have a command and its children run, and end them."""
    async with server.stream_run(HI, approve="all") as run:
        output = await until(run, ToolOutput)
        assert isinstance(output, ToolOutput)
        await waiting.until(lambda: len(commands(mark)) >= 3)
        if how == "stop":
            run.stop(output.call.id)
            returned = await until(run, ToolReturned)
            assert isinstance(returned, ToolReturned)
            assert returned.stopped
            assert not commands(mark)
        elif how == "cancel":
            run.cancel()
    assert not commands(mark)


@pytest.mark.parametrize("how", ["leave", "stop", "cancel"])
async def test_a_command_and_its_children_end_with_it(tmp_path: Path, how: str) -> None:
    mark = f"100{random.randrange(10**6)}"
    command = f"setsid sleep {mark} & (sleep {mark} &) ; echo begun; sleep {mark}"
    async with serving(tmp_path, [shell(command)]) as server:
        await end_commands(server, how, mark)
        await assert_at_rest(server)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_runs_and_cancels_leave_nothing(tmp_path: Path) -> None:
    mark = f"100{random.randrange(10**6)}"
    chance = random.Random(17)
    step = calls(
        ("exec_shell_command", {"command": f"sleep {mark} & echo one; sleep 0.2{mark}"}),
        ("grep_search", {"path": ".", "pattern": "x"}),
        ("write_file", {"path": "b.txt", "content": "x"}),
    )

    async def run_a_while(server: Server) -> None:
        n_tools, n_events = chance.randrange(4), chance.randrange(60)
        async with server.stream_run(HI, approve="all", max_steps=1) as run:
            async for event in run:
                n_events -= 1
                n_tools -= isinstance(event, ToolStarted)
                if n_tools <= 0 and n_events <= 0:
                    return

    async def run_some(server: Server, n_runs: int) -> None:
        for _ in range(n_runs):
            await run_a_while(server)

    async with serving(tmp_path, itertools.repeat(step)) as server:
        await run_some(server, 2)  # what is made once is there
        await trio.testing.wait_all_tasks_blocked(0.01)
        before = descriptors(), trio.lowlevel.current_statistics().tasks_living
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(run_some, server, N_RUNS // 4)
        await trio.testing.wait_all_tasks_blocked(0.01)
        await assert_at_rest(server)
        assert not commands(mark)
        assert (descriptors(), trio.lowlevel.current_statistics().tasks_living) == before
