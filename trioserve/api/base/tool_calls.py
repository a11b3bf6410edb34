"""`ToolCalls`: the calls of tools that clients have made, apart from those of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import trio
from trio_util import AsyncValue

from trioserve.errors import DeadlineExceededError, ServerClosingError
from trioserve.server.observers.observer import ToolWork
from trioserve.tools.tool import Tool, ToolCallContext, ToolResult

#: Calls that run at the same time. Others wait: each may start processes.
_MAX_RUNNING = 32


class ToolCalls:
    """The calls of an app: a bounded number of them, which end with the app."""

    def __init__(self) -> None:
        self.n_open = AsyncValue(0)  # that run, or wait
        self._places = trio.CapacityLimiter(_MAX_RUNNING)
        self._scopes: set[trio.CancelScope] = set()
        self._is_refusing = False

    async def run(
        self,
        tool: Tool,
        arguments: Mapping[str, Any],
        context: ToolCallContext,
        work: ToolWork,
    ) -> ToolResult:
        """Call a tool. When cancelled, what it has started has ended before this raises.

        Args:
            tool: which.
            arguments: by name.
            context: how.
            work: has the deadline, and is told how the call ends.

        Raises:
            ServerClosingError: the app is stopping, or has ended the call.
            DeadlineExceededError: the deadline has passed.
            TrioServeError: as `Tool.call`.
        """
        if self._is_refusing:
            raise ServerClosingError
        deadline = work.context.deadline
        with trio.CancelScope(deadline=deadline) as scope, self._open(scope):
            async with self._places:
                return await _call(tool, arguments, context, work)
        if trio.current_time() >= deadline:
            raise DeadlineExceededError(f"The deadline passed while {tool.info.name} ran.")
        raise ServerClosingError

    @contextmanager
    def _open(self, scope: trio.CancelScope) -> Iterator[None]:
        """Count a call, and let `drain` end it, as long as a block lasts."""
        self._scopes.add(scope)
        self.n_open.value += 1
        try:
            yield
        finally:
            self.n_open.value -= 1
            self._scopes.remove(scope)

    def refuse(self) -> None:
        """Take no more calls."""
        self._is_refusing = True

    async def drain(self, deadline: float) -> None:
        """Wait for the calls that run, until a time (`trio.current_time`), and end the others."""
        with trio.move_on_at(deadline):
            await self.n_open.wait_value(0)
        for scope in self._scopes:
            scope.cancel()
        await self.n_open.wait_value(0)  # what they have started ends soon


async def _call(
    tool: Tool, arguments: Mapping[str, Any], context: ToolCallContext, work: ToolWork
) -> ToolResult:
    try:
        with work.timed():
            result = await tool.call(arguments, context)
    except Exception:
        work.outcome = "failed"
        raise
    work.outcome = "failed" if result.is_error else "finished"
    return result
