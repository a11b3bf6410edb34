"""When MCP servers are started and stopped, in virtual time.

The servers are played by hand: real ones take real time, which a mocked clock does not know.
"""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import attrs
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.mcp_servers import config_of, odd
from trioserve.errors import ModelLoadError, ToolServerError
from trioserve.tools.mcp import server as module
from trioserve.tools.mcp.entries import Entry, StdioEntry
from trioserve.tools.mcp.listing import Listing
from trioserve.tools.mcp.server import COOLDOWN_SECONDS, IDLE_SECONDS, RETRY_SECONDS, McpServer
from trioserve.tools.mcp.tools import open_mcp_servers
from trioserve.tools.tool import ToolCallContext, ToolResult


@attrs.define
class Program:
    """A server: how often it was started, how many of it run, and why it cannot start now."""

    n_starts: int = 0
    n_running: int = 0
    problem: str = ""
    #: Seconds that it takes to list its tools, and when it has listed them.
    list_seconds: float = 0.0
    listed_at: list[float] = attrs.field(factory=list)
    #: Reports other tools.
    change: Callable[[], None] = lambda: None
    #: A call waits while this is not set.
    may_answer: trio.Event = attrs.field(factory=trio.Event)

    async def with_session(
        self,
        entry: Entry,
        use: Callable[[Any], Awaitable[Any]],
        on_list_changed: Callable[[], None] = lambda: None,
    ) -> Any:
        """Stands in for the function of that name."""
        self.n_starts += 1
        self.change = on_list_changed
        await trio.lowlevel.checkpoint()
        if self.problem:
            raise ToolServerError(self.problem)
        self.n_running += 1
        try:
            return await use(self)
        finally:
            self.n_running -= 1

    async def list_tools(self) -> Listing:
        self.listed_at.append(trio.current_time())
        await trio.sleep(self.list_seconds)
        return Listing()

    async def call(
        self, tool: str, arguments: Mapping[str, Any], context: ToolCallContext
    ) -> ToolResult:
        await self.may_answer.wait()
        return ToolResult.of_text(arguments["text"])

    async def is_responsive(self) -> bool:
        await trio.lowlevel.checkpoint()
        return True


@pytest.fixture
def program(monkeypatch: pytest.MonkeyPatch) -> Program:
    program = Program()
    program.may_answer.set()
    monkeypatch.setattr(module, "with_session", program.with_session)
    return program


async def test_what_is_raised_beside_servers_comes_out_as_it_is(program: Program) -> None:
    program.problem = "it is not there"
    with pytest.raises(ModelLoadError, match="no model"):
        async with open_mcp_servers(config_of(odd=odd())) as servers:
            await servers.listed()
            raise ModelLoadError("no model")


@asynccontextmanager
async def opened() -> AsyncIterator[McpServer]:
    """A server that has had no call yet."""

    def on_tools(server: McpServer, listing: Listing) -> None:
        pass

    async with trio.open_nursery() as nursery:
        yield McpServer(StdioEntry(name="a", command="program"), on_tools, nursery)
        nursery.cancel_scope.cancel()


async def echo(server: McpServer, text: str = "x") -> None:
    """Call its tool."""
    result = await server.call("echo", {"text": text}, lambda _: None, may_repeat=False)
    assert result == ToolResult.of_text(text)


async def test_it_is_stopped_when_it_was_idle_for_long_enough(
    mock_clock: MockClock, program: Program
) -> None:
    async with opened() as server:
        for _ in range(3):
            await echo(server)
            mock_clock.jump(IDLE_SECONDS - 1)
            await wait_all_tasks_blocked()
            assert (program.n_starts, program.n_running) == (1, 1)
        mock_clock.jump(1)
        await wait_all_tasks_blocked()
        assert program.n_running == 0
        await echo(server)
        assert (program.n_starts, program.n_running) == (2, 1)
    assert program.n_running == 0


async def test_it_is_not_stopped_in_the_middle_of_a_call(
    mock_clock: MockClock, program: Program
) -> None:
    program.may_answer = trio.Event()
    async with opened() as server:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(echo, server)
            await wait_all_tasks_blocked()
            mock_clock.jump(10 * IDLE_SECONDS)
            await wait_all_tasks_blocked()
            program.may_answer.set()
        mock_clock.jump(IDLE_SECONDS - 1)
        await wait_all_tasks_blocked()
        assert (program.n_starts, program.n_running) == (1, 1)


async def test_a_call_just_when_it_is_stopped_starts_it_again(
    mock_clock: MockClock, program: Program
) -> None:
    async with opened() as server:
        await echo(server)
        mock_clock.jump(IDLE_SECONDS)
        await echo(server)  # before the task that stops it has run
        assert (program.n_starts, program.n_running) == (2, 1)


async def test_a_start_that_fails_is_not_repeated_by_each_call(
    mock_clock: MockClock, program: Program
) -> None:
    program.problem = "No such file"
    async with opened() as server:
        for seconds in (0, 1, COOLDOWN_SECONDS - 1.5):
            mock_clock.jump(seconds)
            with pytest.raises(ToolServerError, match="No such file"):
                await echo(server)
            program.problem = program.problem if seconds == 0 else ""  # it could be started now
        assert program.n_starts == 1
        mock_clock.jump(COOLDOWN_SECONDS)
        await echo(server)
        assert program.n_starts == 2


async def test_listing_is_tried_again_at_longer_and_longer_intervals(
    autojump_clock: MockClock, program: Program
) -> None:
    program.problem = "No such file"
    times: list[float] = []
    async with opened() as server:
        began = trio.current_time()
        await server.discover(lambda: times.append(trio.current_time() - began))
    assert times == pytest.approx([sum(RETRY_SECONDS[:n]) for n in range(len(RETRY_SECONDS) + 1)])


@pytest.mark.parametrize(("takes", "pause"), [(0.0, 1.0), (2.0, 20.0)])
async def test_a_list_that_changes_all_the_time_is_not_read_all_the_time(
    autojump_clock: MockClock, program: Program, takes: float, pause: float
) -> None:
    program.list_seconds = takes
    async with opened() as server:
        await echo(server)
        while len(program.listed_at) < 4:
            program.change()
            await trio.sleep(0.25)
    steps = [b - a for a, b in itertools.pairwise(program.listed_at)]
    assert steps == pytest.approx([takes + pause] * 3, abs=0.3)
