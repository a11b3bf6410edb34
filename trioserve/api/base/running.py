"""What an app runs for clients and other requests can reach or end: tool calls and responses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import attrs
import trio
from trio_util import AsyncValue

from trioserve.errors import DeadlineExceededError, ServerClosingError, UnknownToolCallError
from trioserve.server.observers.observer import ToolRecord
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import ChatStream
from trioserve.tools.tool import Tool, ToolCallContext, ToolResult

#: Calls that run at the same time. Others wait: each may start processes.
_MAX_RUNNING = 32


class ClientToolCalls:
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
        record: ToolRecord,
    ) -> ToolResult:
        """Call a tool. When cancelled, what it has started has ended before this raises.

        Args:
            tool: which.
            arguments: by name.
            context: how.
            record: has the deadline, and is told how the call ends.

        Raises:
            ServerClosingError: the app is stopping, or has ended the call.
            DeadlineExceededError: the deadline has passed.
            TrioServeError: as `Tool.call`.
        """
        if self._is_refusing:
            raise ServerClosingError
        deadline = record.context.deadline
        with trio.CancelScope(deadline=deadline) as scope, self._open(scope):
            async with self._places:
                return await _call(tool, arguments, context, record)
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


#: What is said of the id of a completion that is not running here.
NOT_RUNNING = "no active completion for this id"


@attrs.frozen(eq=False)
class Running:
    """A response that is being sent."""

    streams: Sequence[ChatStream]  # of a run: that of its step
    client: str  # who may find it
    reasoning_control: bool  # whether the request allows that its reasoning is ended
    run: AgentRun | None = None  # what it is the answer of, if the server runs tools for it

    @property
    def live(self) -> list[ChatStream]:
        """The streams that have not ended."""
        return [stream for stream in self.streams if not stream.mailbox.ended]

    @property
    def has_ended(self) -> bool:
        """Whether there is nothing left to end. A run may be between two streams."""
        return not self.live if self.run is None else self.run.is_over

    def cancel(self) -> None:
        """End it; its reader gets a `RequestEndedError`."""
        if self.run is not None:
            self.run.cancel()
            return
        for stream in self.live:
            stream.cancel()


def is_unknown(status: int, body: bytes) -> bool:
    """Whether a server told, when it was asked about a response, that it does not send it.

    `body` is JSON. A response whose calls of tools do not include the one in question is known.
    """
    told = json.loads(body)
    if status == 404:
        return bool(told["error"].get("code") != UnknownToolCallError.code)
    return status == 200 and bool(told.get("message") == NOT_RUNNING)


class Responses:
    """The responses of an app, by id."""

    def __init__(self) -> None:
        self._running: dict[str, Running] = {}

    @contextmanager
    def running(self, id_: str, response: Running) -> Iterator[None]:
        """Have a client find its response by the id in the chunks, as long as a block lasts."""
        self._running[id_] = response
        try:
            yield
        finally:
            del self._running[id_]

    def find(self, id_: str, client: str) -> Running | None:
        """Find a response that is being sent, unless it is another client's."""
        found = self._running.get(id_)
        return found if found is not None and found.client == client else None
