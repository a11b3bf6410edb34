"""`McpServer`: an MCP server, which is started when one of its tools is called."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import trio
from trio_util import AsyncValue

from trioserve.concurrency import Bell
from trioserve.errors import ToolServerError
from trioserve.log import get_logger
from trioserve.tools.mcp.entries import Entry
from trioserve.tools.mcp.listing import Listing
from trioserve.tools.mcp.session import ConnectionEndedError, McpSession, with_session
from trioserve.tools.tool import ToolCallContext, ToolResult

_log = get_logger("trioserve.tools")

#: Seconds without a call after which a server is ended.
IDLE_SECONDS = 300.0

#: Seconds after a start that failed in which the server is not started again.
COOLDOWN_SECONDS = 5.0

#: Seconds between attempts to list the tools of a server that has never listed them.
RETRY_SECONDS = (5.0, 30.0, 120.0, 600.0)

_STOPPED = "it was stopped"

#: The least seconds between two lists of a server that reports changed tools, and how much longer
#: than a list that is.
_RELIST_SECONDS = 1.0
_RELIST_REST = 10


class McpServer:
    """One process, or one session of a remote server, which all calls share.

    Args:
        entry: which.
        on_tools: receives its tools whenever it has listed them.
        nursery: where it runs.
    """

    def __init__(
        self,
        entry: Entry,
        on_tools: Callable[[McpServer, Listing], None],
        nursery: trio.Nursery,
    ) -> None:
        self.entry = entry
        self._on_tools = on_tools
        self._nursery = nursery
        self._run: _Connection | None = None

    async def discover(self, tried: Callable[[], None]) -> None:
        """List the tools and stop the server. If it fails, try again after a while, and again.

        Args:
            tried: is called after each attempt.
        """
        for delay in (*RETRY_SECONDS, None):
            try:
                await with_session(self.entry, self._list)
            except ToolServerError as error:
                again = {} if delay is None else {"next_attempt_s": delay}
                _log.warning(
                    "MCP server has no tools", server=self.entry.name, problem=str(error), **again
                )
            else:
                return
            finally:
                tried()
            if delay is not None:
                await trio.sleep(delay)

    async def call(
        self,
        tool: str,
        arguments: Mapping[str, Any],
        context: ToolCallContext,
        *,
        may_repeat: bool,
    ) -> ToolResult:
        """Call a tool, and start the server if it does not run. Cancelling reaches the server.

        A server that no longer answers after a call was given up is ended.

        Args:
            tool: its name, as the server has it.
            arguments: by name.
            context: receives the progress, and answers what the server asks.
            may_repeat: whether the call can be made again when the server ends while it does it.

        Raises:
            ToolServerError: the server cannot be started, has ended, or answers nonsense.
            ToolTimeoutError: the call takes too long.
        """
        for attempt in (1, 2):
            run = await self._running()
            try:
                with run.call() as session:
                    return await session.call(tool, arguments, context)
            except ConnectionEndedError as error:
                run.stop(str(error))
                await run.ended.wait()
                if attempt == 2 or not (may_repeat or error.is_unheard):
                    raise ToolServerError(run.problem) from None
        raise AssertionError("the second attempt returns or raises")

    async def _running(self) -> _Connection:
        """The connection, which is started unless it runs. Raises ToolServerError."""
        while True:
            run = self._run
            if run is None or run.is_over():
                if self._nursery.cancel_scope.cancel_called:
                    raise ToolServerError(_STOPPED)
                run = self._run = _Connection()
                self._nursery.start_soon(self._serve, run)
            await run.started.wait()
            if run.session is None:
                raise ToolServerError(run.problem)
            if await run.can_be_called():
                return run

    async def _serve(self, run: _Connection) -> None:
        """Run the server until it ends, or is idle for long."""
        try:
            await with_session(self.entry, partial(self._use, run), run.has_other_tools.ring)
        except ToolServerError as error:
            run.problem = str(error)
            _log.warning("MCP server has ended", server=self.entry.name, problem=str(error))
        finally:
            run.end()

    async def _use(self, run: _Connection, session: McpSession) -> None:
        with run.scope:
            run.start(session)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._relist, run, session)
                nursery.start_soon(run.watch, self.entry.timeout)

    async def _relist(self, run: _Connection, session: McpSession) -> None:
        while True:
            await run.has_other_tools.wait()
            start = trio.current_time()
            try:
                await self._list(session)
            except ToolServerError as error:
                name = self.entry.name
                _log.warning("MCP server keeps its tools", server=name, problem=str(error))
            took = trio.current_time() - start
            await trio.sleep(max(_RELIST_SECONDS, _RELIST_REST * took))

    async def _list(self, session: McpSession) -> None:
        self._on_tools(self, await session.list_tools())


class _Connection:
    """The time between a start and an end of a server."""

    def __init__(self) -> None:
        self.session: McpSession | None = None
        self.problem = _STOPPED  # or why else it has ended
        self.started = trio.Event()  # or it could not be
        self.ended = trio.Event()
        self.scope = trio.CancelScope()
        self.has_other_tools = Bell()
        self._n_calls = 0
        self._in_doubt = AsyncValue(False)  # a call was given up: does the server still answer?
        self._may_start_again_at = 0.0

    def is_over(self) -> bool:
        """Whether to start the server again."""
        if self.ended.is_set() and self.session is None:
            return trio.current_time() >= self._may_start_again_at
        return self.ended.is_set() or self.scope.cancel_called

    def start(self, session: McpSession) -> None:
        self.session = session
        self._set_deadline()
        self.started.set()

    def stop(self, problem: str) -> None:
        if not self.scope.cancel_called:
            self.problem = problem
            self.scope.cancel()

    def end(self) -> None:
        self._may_start_again_at = trio.current_time() + COOLDOWN_SECONDS
        self.ended.set()
        self.started.set()
        self._in_doubt.value = False

    @contextmanager
    def call(self) -> Iterator[McpSession]:
        """Yield the session, and count the call while it runs."""
        assert self.session is not None
        self._n_calls += 1
        self._set_deadline()
        is_answered = False
        try:
            yield self.session
            is_answered = True
        finally:
            self._n_calls -= 1
            self._set_deadline()
            if not is_answered and not self.ended.is_set():
                self._in_doubt.value = True

    async def can_be_called(self) -> bool:
        """The server answers. Waits for that only if it has no other call to do."""
        if self._n_calls == 0:
            await self._in_doubt.wait_value(False)
        return not self.is_over()

    async def watch(self, patience: float) -> None:
        """Stop a server that is silent after a call was given up; a busy one gets some seconds."""
        while True:
            await self._in_doubt.wait_value(True)
            since = trio.current_time()
            assert self.session is not None
            while not await self.session.is_responsive():
                if self._n_calls == 0 or trio.current_time() - since >= patience:
                    self.stop("it did not answer any more, and was stopped")
                await trio.lowlevel.checkpoint()
            self._in_doubt.value = False

    def _set_deadline(self) -> None:
        is_idle = self._n_calls == 0
        self.scope.deadline = trio.current_time() + IDLE_SECONDS if is_idle else math.inf
