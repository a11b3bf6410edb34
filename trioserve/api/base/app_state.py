"""What an app knows of its connections, requests and running answers, and what answers them."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from functools import partial
from typing import Any, TypeVar

import attrs
import trio
from quart import Quart, Response, current_app, request
from trio_util import AsyncValue

from trioserve.api.batches import Batches
from trioserve.api.sessions import Sessions
from trioserve.concurrency import Gate, Phase, alongside, deadline_scope
from trioserve.config import Config
from trioserve.errors import (
    ModelLoadingError,
    TrioServeError,
    UnavailableError,
    UnknownToolCallError,
    raised_alone,
)
from trioserve.fair_limiter import tool_calls
from trioserve.log import get_logger
from trioserve.server.keys import Keys
from trioserve.server.limits.memory import MemoryBudget
from trioserve.server.observers.observer import Observer, ToolRecord
from trioserve.server.runs.run import AgentRun
from trioserve.server.stream import ChatStream
from trioserve.server.usage import Usage
from trioserve.store import Records, Store, open_store
from trioserve.tools.registry import ToolRegistry
from trioserve.tools.tool import Tool, ToolCallContext, ToolResult

_T = TypeVar("_T")

# -- tool calls and answers that other requests can reach or end


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
        return [stream for stream in self.streams if not stream.mailbox.is_over]

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


# -- the state of an app


_log = get_logger("trioserve.api")

#: Where an app has its state: `app.extensions[NAME]`.
NAME = "trioserve"


class Connections:
    """The connections of an app, which `tcp` opens. The addresses of clients share the places.

    Args:
        config: the limits. May be set until the app is served.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.n_connections = 0  # that are served
        self.n_refused = 0  # connections that are being told that there are too many
        self._n_of: Counter[str] = Counter()  # by address
        #: Connections that wait for their clients, by address: the longest wait first.
        self._waiting: defaultdict[str, dict[trio.CancelScope, None]] = defaultdict(dict)

    @contextmanager
    def connection(self, address: str, limit: float) -> Iterator[trio.CancelScope]:
        """Count a connection during a block, which is cancelled when its place is needed.

        It waits for its client until `is_served` is called.

        Raises:
            UnavailableError: the limit is reached, and none can be closed.
        """
        if self.n_connections >= limit and not self._make_room_for(address):
            raise UnavailableError("The server has as many connections as it takes.")
        self.n_connections += 1
        self._n_of[address] += 1
        scope = trio.CancelScope()
        self.waits(address, scope)
        try:
            with scope:
                yield scope
        finally:
            self.is_served(address, scope)
            self.n_connections -= 1
            self._n_of[address] -= 1
            if not self._n_of[address]:
                del self._n_of[address]

    def waits(self, address: str, scope: trio.CancelScope) -> None:
        """Note that a connection waits for its client from now on: for a request, or its body."""
        self._waiting[address].pop(scope, None)
        self._waiting[address][scope] = None

    def is_served(self, address: str, scope: trio.CancelScope) -> None:
        """Note that a connection does not wait for its client: it is being answered."""
        self._waiting[address].pop(scope, None)
        if not self._waiting[address]:
            del self._waiting[address]

    def _make_room_for(self, address: str) -> bool:
        """Close the connection that waits longest, of the address that has most.

        Returns:
            Whether there was one. Addresses with no more connections than `address` lose none.
        """
        n_own = self._n_of[address]
        able = [each for each in self._waiting if each == address or self._n_of[each] > n_own]
        if not able:
            return False
        most = max(able, key=self._n_of.__getitem__)
        scope = next(iter(self._waiting[most]))
        self.is_served(most, scope)
        scope.cancel(reason="another connection needs the place")
        return True


class AppState(Connections, ABC):
    """The state of an app: it counts connections and requests, and a server or a router answers.

    That begins with `run` and ends with `stop`.

    Args:
        config: what to serve. May be set until `run` is called.
    """

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        #: The API keys. They are loaded when the app is served.
        self.keys = Keys(config)
        #: What they use.
        self.usage = Usage()
        self.n_answers: Counter[tuple[str, int]] = Counter()  # by route and status
        self.n_answering = AsyncValue(0)  # requests whose responses are not sent yet
        self.streams = Sessions()  # that outlive the connections of their readers
        self._store: Store | None = None
        self.stored_runs: dict[str, Any] = {}  # responses in the background that run, by id
        #: Ends what was running in the store when the last server ended. Set by what makes the app.
        self.settle: Callable[[Records], None]
        self._own_memory = MemoryBudget.of(config)
        #: True if all requests come through a router, whose word on them counts.
        self.has_router = False
        #: Why nothing answers: it could not begin, or it broke.
        self.failure: TrioServeError | None = None
        #: The calls of `tools` by clients.
        self.tool_calls = ClientToolCalls()
        #: Refuses requests while the app drains, and has ended when the app is to end, or broke.
        self.gate = Gate()
        self.batches = Batches(self.gate)
        self._scope = trio.CancelScope()
        self._loaded = trio.Event()

    @property
    def memory(self) -> MemoryBudget:
        """The budget of the memory that requests hold."""
        return self._own_memory

    @property
    def store(self) -> Store:
        """The store. Raises as `_there`."""
        return self._there(self._store)

    def _there(self, part: _T | None) -> _T:
        """Give a part of the app, which exists from when it can serve until it ends.

        Raises:
            ModelLoadingError: it does not exist yet.
            ServerClosingError: the app is stopping.
            TrioServeError: `failure`, when there is one.
        """
        if part is not None:
            return part
        if self.failure is not None:
            raise self.failure.again()
        self.gate.check()
        raise ModelLoadingError

    @asynccontextmanager
    async def _storing(self) -> AsyncIterator[Store]:
        """Open the store for a block. Raises StoreError."""
        config = self.config
        async with open_store(
            config.store,
            max_bytes=config.store_size,
            days=config.store_days,
            shared=config.has_several_keys,
        ) as store:
            if config.store is not None:
                with suppress(UnavailableError):  # it is settled at the next start
                    await store.do(self.settle)
            self._store = store
            try:
                async with self.usage.kept(store):
                    yield store
            finally:
                self._store = None

    def _outliving(self, store: Store, config: Config) -> AbstractAsyncContextManager[trio.Nursery]:
        """Run what outlives the requests that began it, for a block."""
        return alongside(
            partial(self.streams.run, config),
            partial(self.batches.run, store, config, self.keys),
            self.keys.follow,
        )

    @property
    @abstractmethod
    def tools(self) -> ToolRegistry:
        """The tools that run here. Raises TrioServeError: nothing answers requests yet, or now."""

    @property
    @abstractmethod
    def observers(self) -> Sequence[Observer]:
        """The observers of tool calls. Raises as `tools`."""

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
        await self.gate.phase.wait_value(Phase.CLOSED)
        await self.gate.drained()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve until `stop` is called. Reports started once requests are taken.

        Raises:
            TrioServeError: whatever ends it. Written to the log, and kept in `failure`.
        """
        if self.gate.phase.value is not Phase.OPEN:
            return  # it was stopped before it began
        with self.gate.open(lambda _error: self._scope.cancel()):
            try:
                with self._scope:
                    await self._serve(task_status)
            except Exception as group:
                error = raised_alone(group)
                if isinstance(error, TrioServeError):
                    self.failure = error
                    _log.error(error.message)
                raise error from error.__cause__
            finally:
                self._forget()
                self.gate.end()

    async def stop(self) -> None:
        """End `run`, if it was called, and wait until it has ended."""
        self.gate.end()
        with trio.CancelScope(shield=True):
            await self.gate.drained()


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
