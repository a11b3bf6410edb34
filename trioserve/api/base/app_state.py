"""`AppState`: what an app knows of its connections and requests, and what answers them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence

import structlog
import trio
from quart import Quart, Response, current_app, request
from trio_util import AsyncValue

from trioserve.api.base.running import ClientToolCalls
from trioserve.api.sessions import Sessions
from trioserve.config import Config
from trioserve.errors import TrioServeError
from trioserve.server.limits.memory import MemoryBudget
from trioserve.server.observers.observer import Observer
from trioserve.tools.registry import ToolRegistry

_log = structlog.stdlib.get_logger("trioserve.api")

#: Where an app has its state: `app.extensions[NAME]`.
NAME = "trioserve"


class AppState(ABC):
    """The state of an app: it counts connections and requests, and a server or a router answers.

    That begins with `run` and ends with `stop`.

    Args:
        config: what to serve. May be set until `run` is called.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.n_connections = 0  # that are served
        self.n_refused = 0  # connections that are being told that there are too many
        self.n_answers: Counter[tuple[str, int]] = Counter()  # by route and status
        self.n_answering = AsyncValue(0)  # requests whose responses are not sent yet
        self.streams = Sessions()  # that outlive the connections of their readers
        self._own_memory = MemoryBudget.of(config)
        #: Why nothing answers: it could not begin, or it broke.
        self.failure: TrioServeError | None = None
        #: The calls of `tools` by clients.
        self.tool_calls = ClientToolCalls()
        self._scope = trio.CancelScope()
        self._stopping = False
        self._loaded = trio.Event()
        self._ended = trio.Event()

    @property
    def memory(self) -> MemoryBudget:
        """What requests may hold."""
        return self._own_memory

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


def attach(app: Quart, state: AppState) -> None:
    """Make `state` the one of an app."""
    app.extensions[NAME] = state


def app_state_of(app: Quart) -> AppState:
    """The state of an app."""
    state = app.extensions[NAME]
    assert isinstance(state, AppState)
    return state


def current_app_state() -> AppState:
    """The state of the app that handles the current request."""
    return app_state_of(current_app)


async def count_answer(response: Response) -> Response:
    """Count an answer by its route and status."""
    route = request.url_rule.rule if request.url_rule is not None else ""
    current_app_state().n_answers[route, response.status_code] += 1
    return response
