"""The calls of tools by clients."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

import trio

from trioserve.concurrency import Gate, deadline_scope
from trioserve.fair_limiter import tool_calls
from trioserve.server.observers.observer import ToolRecord
from trioserve.tools.tool import Tool, ToolCallContext, ToolResult

#: Seconds that calls of MCP servers have to finish when the server ends.
_MCP_SECONDS = 1.0


class ClientToolCalls:
    """The calls of an app: a bounded number of them, which end with the app."""

    def __init__(self) -> None:
        self.gate = Gate()
        self._of_mcp = Gate()

    async def run(
        self,
        tool: Tool,
        arguments: Mapping[str, Any],
        context: ToolCallContext,
        record: ToolRecord,
    ) -> ToolResult:
        """Call a tool. When cancelled, what it has started has ended before this raises.

        Args:
            tool: which.
            arguments: by name.
            context: how.
            record: holds the deadline, and records how the call ends.

        Raises:
            ServerClosingError: the app is stopping, or has ended the call.
            DeadlineExceededError: the deadline has passed.
            QueueFullError: too many calls of the client wait.
            TrioServeError: as `Tool.call`.
        """
        message = f"The deadline passed while {tool.info.name} ran."
        of_mcp = self._of_mcp.open() if tool.info.kind == "mcp" else nullcontext()
        with self.gate.open(), of_mcp, deadline_scope(record.context.deadline, message):
            async with tool_calls().place():
                return await _call(tool, arguments, context, record)

    async def drain(self, deadline: float) -> None:
        """Wait for the calls that run, until a time (`trio.current_time`), and end the others.

        Those of MCP servers have `_MCP_SECONDS`: nothing bounds how long they take.
        """
        self.gate.refuse()
        await self._of_mcp.drain(min(deadline, trio.current_time() + _MCP_SECONDS))
        await self.gate.drain(deadline)
        await self.gate.drained()  # what they have started ends soon


async def _call(
    tool: Tool, arguments: Mapping[str, Any], context: ToolCallContext, record: ToolRecord
) -> ToolResult:
    try:
        with record.timed():
            result = await tool.call(arguments, context)
    except Exception:
        record.outcome = "failed"
        raise
    record.outcome = "failed" if result.is_error else "finished"
    return result
