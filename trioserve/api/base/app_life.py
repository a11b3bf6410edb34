"""`AppLife`: the life of what answers requests, a server or a router, within the life of an app."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import structlog
import trio

from trioserve.api.base.intake import Intake
from trioserve.api.base.running import ClientToolCalls
from trioserve.config import Config
from trioserve.errors import TrioServeError
from trioserve.server.observers.observer import Observer
from trioserve.tools.registry import ToolRegistry

_log = structlog.stdlib.get_logger("trioserve.api")


class AppLife(Intake, ABC):
    """An intake with something behind it, which begins with `run` and ends with `stop`.

    Args:
        config: what to serve. May be set until `run` is called.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        #: Why nothing answers: it could not begin, or it broke.
        self.failure: TrioServeError | None = None
        #: The calls of `tools` by clients.
        self.tool_calls = ClientToolCalls()
        self._scope = trio.CancelScope()
        self._stopping = False
        self._loaded = trio.Event()
        self._ended = trio.Event()

    @property
    @abstractmethod
    def tools(self) -> ToolRegistry:
        """The tools that run here. Raises TrioServeError: nothing answers requests yet, or now."""

    @property
    @abstractmethod
    def observers(self) -> Sequence[Observer]:
        """Who is told of calls of tools. Raises as `tools`."""

    @abstractmethod
    async def _serve(self, task_status: trio.TaskStatus[None]) -> None:
        """Begin, report it with `_began`, and answer requests until cancelled."""

    @abstractmethod
    def _forget(self) -> None:
        """Let go of what has answered requests."""

    @abstractmethod
    async def drain(self) -> None:
        """Take nothing new, and wait for what runs, but not for ever."""

    def _tell_abilities(self, tools: ToolRegistry) -> None:
        """Log what clients may now have this server do, apart from what models do."""
        config, may = self.config, tools.abilities()
        if config.has_mcp_proxy:
            where = ", ".join(config.ui_mcp_proxy_hosts) or "any public address"
            may.append(f"Pages may reach MCP servers through this one, at {where}.")
        for sentence in may:
            _log.warning(sentence)
        if may and "*" in config.cors_origins:
            _log.warning("security: --cors-origins lets every web page that is opened on a machine "
                         "which can reach this server do all of this")  # fmt: skip

    def _began(self, task_status: trio.TaskStatus[None], tools: ToolRegistry) -> None:
        self._tell_abilities(tools)
        self._loaded.set()
        task_status.started()

    async def wait_loaded(self) -> None:
        """Wait until requests are taken. Waits on when they cannot be."""
        await self._loaded.wait()

    async def wait_ended(self) -> None:
        """Wait until this has ended, or could not begin; `failure` says why."""
        await self._ended.wait()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop` is called. Reports started once requests are taken.

        Raises:
            TrioServeError: whatever ends it. Written to the log, and kept in `failure`.
        """
        try:
            with self._scope:
                await self._serve(task_status)
        except TrioServeError as error:
            self.failure = error
            _log.error(error.message)
            raise
        finally:
            self._forget()
            self._stopping = True
            self._ended.set()

    async def stop(self) -> None:
        """End what runs, if `run` was called, and wait until it has ended."""
        self._stopping = True
        self._scope.cancel()
        with trio.CancelScope(shield=True):
            await self._ended.wait()
