"""`AppState` and `Service`: what an app knows of its requests, and the life of its `Server`."""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AbstractContextManager,
    asynccontextmanager,
    contextmanager,
    suppress,
)
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import trio
from trio_util import AsyncValue

from trioserve.api import metrics
from trioserve.api.base import errors
from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import Caller
from trioserve.api.base.described import Model, adapters_of, of_server, properties_of
from trioserve.api.base.generation import Responses
from trioserve.api.base.models import Card, Details, Loaded, Models, abilities
from trioserve.api.base.reply import Data, Reply, json
from trioserve.api.base.routes import Responder, Route, not_found
from trioserve.api.batches import Batches
from trioserve.api.connections import Connections
from trioserve.api.sessions import Sessions
from trioserve.api.tools.calls import ClientToolCalls
from trioserve.api.tools.proxy import Proxy
from trioserve.chat.uploads import Upload
from trioserve.concurrency import Feed, Gate, Phase, alongside
from trioserve.config import Config
from trioserve.errors import (
    ModelLoadingError,
    NotFoundError,
    NotSupportedError,
    TrioServeError,
    UnavailableError,
    UnknownModelError,
    raised_alone,
)
from trioserve.left_out import answer_another
from trioserve.log import get_logger
from trioserve.models.fetch import fetch
from trioserve.server import Server
from trioserve.server.keys import Keys
from trioserve.server.lifecycle.engine import Loader
from trioserve.server.limits.memory import MemoryBudget, MemoryReservation
from trioserve.server.model import LoadedModel
from trioserve.server.model_server import ModelServer
from trioserve.server.observers.metrics import Metrics
from trioserve.server.observers.observer import Observer
from trioserve.server.prompts.infill import missing_tokens
from trioserve.server.usage import Usage
from trioserve.store import Records, Store, open_store
from trioserve.tools.registry import ToolRegistry

if TYPE_CHECKING:
    from trioserve.router.prospects import Prospects
    from trioserve.router.states import FleetEvent

_T = TypeVar("_T")

_log = get_logger("trioserve.api")


class AppState(Connections, Models):
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
        #: Reads files that clients have uploaded. Set by what makes the app.
        self.read_uploads: Callable[
            [AppState, Sequence[str], Caller], Awaitable[Mapping[str, Upload]]
        ]
        #: Ends what was running in the store when the last server ended. Set by what makes the app.
        self.settle: Callable[[Records], None]
        self._own_memory = MemoryBudget.of(config)
        self.responses = Responses()
        self._proxy: Proxy | None = None
        #: The descriptions of the routes that were asked for, by the name of the API.
        self.descriptions: dict[str | None, Any] = {}
        #: Why nothing answers: it could not begin, or it broke.
        self.failure: TrioServeError | None = None
        #: The calls of `tools` by clients.
        self.tool_calls = ClientToolCalls()
        #: Refuses requests while the app drains, and has ended when the app is to end, or broke.
        self.gate = Gate()
        self.batches = Batches(self)
        #: The routes, and how each is answered, by its method and path. Set by what makes the app.
        self.routes: list[Route] = []
        self.answers: dict[tuple[str, str], Responder] = {}
        self._scope = trio.CancelScope()
        self._loaded = trio.Event()

    @property
    def memory(self) -> MemoryBudget:
        """The budget of the memory that requests hold."""
        return self._own_memory

    @contextmanager
    def request(self) -> Iterator[MemoryReservation]:
        """Count a request for a block, and the memory that it holds."""
        self.n_answering.value += 1
        try:
            with self.memory.hold() as held:
                yield held
        finally:
            self.n_answering.value -= 1

    @abstractmethod
    def answer_of(self, route: Route) -> Responder:
        """Make the function that answers a route."""

    def patient(self, route: Route, answer: Responder) -> Responder:
        """Make the function that answers a route as `answer` does, also where that takes long."""
        return answer

    def route_at(self, method: str, path: str) -> Route:
        """The route of a path without parts that vary."""
        return next(one for one in self.routes if (one.method, one.path) == (method, path))

    def not_found(self, path: str) -> NotFoundError:
        """Make the error of a path that has no route."""
        return not_found(path, (route.path for route in self.routes))

    async def reply_to(self, incoming: Incoming, caller: Caller) -> Reply:
        """Reply to a request that this app asks itself. Errors are replies, too."""
        try:
            answer = self.answers.get((incoming.method, incoming.path))
            if answer is None:
                raise self.not_found(incoming.path)
            return await answer(incoming, caller, {})
        except Exception as error:
            caller.tally.error = raised_alone(error)
            return errors.reply(caller.tally.error, incoming.path)

    async def uploads(self, ids: Sequence[str], caller: Caller) -> Mapping[str, Upload]:
        """Read files that a caller has uploaded."""
        return await self.read_uploads(self, ids, caller)

    @property
    def proxy(self) -> Proxy:
        """The requests of pages to other servers."""
        if self._proxy is None:
            self._proxy = Proxy.of(self.config)
        return self._proxy

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
            partial(self.batches.run, store),
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


#: Seconds for reporting an engine failure to clients, before the service ends.
_FAREWELL = 3.0


class Service(AppState):
    """Holds the `Server` of an app, which answers while the model is still loading.

    Making one loads nothing; `run` does.

    Args:
        config: what to serve. May be set until `run` is called.
        load: loads the model; the default is that of `Server`.
    """

    def __init__(self, config: Config | None = None, *, load: Loader | None = None) -> None:
        super().__init__(config or Config())
        #: Finds the files of the models, and downloads missing ones.
        self.fetch: Callable[[Config], Awaitable[Config]] = fetch
        self._load = load
        self._server: Server | None = None

    @property
    def memory(self) -> MemoryBudget:
        """The memory budget of requests; a separate budget until the model is loaded."""
        return self._own_memory if self._server is None else self._server.memory

    @property
    def server(self) -> Server:
        """The server that answers requests. Raises as `_there`."""
        return self._there(self._server)

    @property
    def tools(self) -> ToolRegistry:
        return self.server.tools

    @property
    def observers(self) -> Sequence[Observer]:
        return self.server.observers

    def answer_of(self, route: Route) -> Responder:
        return route.answered_by(self)

    async def _serve(self, task_status: trio.TaskStatus[None]) -> None:
        """Load the model and serve it.

        Raises:
            ModelLoadError: the model cannot be loaded.
            HubError: it cannot be downloaded.
            StoreError: the store cannot be used.
            EngineError: the engine has failed, and the configuration says that this is the end.
        """
        async with self._storing() as store:
            server = self._make_server(await self.fetch(self.config))
            async with server, self._outliving(store, server.config):
                self._server = server
                self._began(task_status, server.tools)
                await self._until_failure(server)

    def _forget(self) -> None:
        self._server = None

    def _make_server(self, config: Config) -> Server:
        more: dict[str, Any] = {} if self._load is None else {"load": self._load}
        return Server(config, keys=self.keys, usage=self.usage, **more)

    async def _until_failure(self, server: Server) -> None:
        """Wait until the engine has failed and clients have the error, then raise the failure."""
        failure = await server.lifecycle.wait_failure()
        if self.config.on_engine_failure == "stay":
            await trio.sleep_forever()
        with trio.move_on_after(_FAREWELL):
            await self.drain()
            await self.n_answering.wait_value(0)
        raise failure

    async def drain(self, timeout: float | None = None) -> None:
        """Refuse new requests, and wait for the running ones. Those that are still running after
        `timeout` seconds end with an error. The default is the configuration's `drain_timeout`.
        """
        self.gate.refuse()
        if self._server is None:
            self._scope.cancel()  # gives up loading
            return
        timeout = self.config.drain_timeout if timeout is None else timeout
        deadline = trio.current_time() + timeout
        self.tool_calls.gate.refuse()
        await self._server.drain(timeout)
        await self.tool_calls.drain(deadline)

    # -- the model

    async def use(self, name: str | None, caller: Caller) -> Server:
        """The server, whose model answers to any name. It may sleep."""
        server = self._usable(caller)
        is_open = server.sleeping or server.adapters.possible  # who it means is seen later
        if name and not is_open and not _is_named(server, name):
            answer_another(name, server.model.info.name)
        return server

    def _usable(self, caller: Caller) -> Server:
        """The server, if a caller may use it. Raises PermissionDeniedError, and as `server`."""
        server = self.server
        if caller.key is not None:
            caller.check_model(*server.model.names)
        return server

    def _named(self, name: str, caller: Caller) -> Server:
        """The server, if its model has a name.

        Raises:
            UnknownModelError: it is the name of another model.
            TrioServeError: as `use`.
        """
        server = self._usable(caller)
        if not _is_named(server, name):
            raise UnknownModelError(
                f"There is no model {name!r} here. The model is {server.model.info.name!r}.",
                param="model",
            )
        return server

    def check_ready(self) -> None:
        """Check that the server accepts requests. Raises as `server`, or UnavailableError."""
        if self.failure is not None:
            raise UnavailableError(self.failure.message)
        self.server.lifecycle.check_ready()

    def check_live(self) -> None:
        """Check that the engine works, if the model is loaded. Raises UnavailableError."""
        if self.failure is not None:
            raise UnavailableError(self.failure.message)
        if self._server is not None:
            self._server.lifecycle.check_live()

    def _mine(self, caller: Caller) -> list[Server]:
        """The server, if a caller may use its model. Raises as `server`."""
        server = self.server
        return [server] if caller.may_use(*server.model.names) else []

    async def listed(self, caller: Caller, *, reload: bool = False) -> Sequence[Model]:
        servers = self._mine(caller)
        return [one for each in servers for one in (of_server(each), *adapters_of(each))]

    async def describe(self, name: str, caller: Caller) -> Model:
        adapters = {each.id: each for each in adapters_of(self._usable(caller))}
        return adapters.get(name) or of_server(self._named(name, caller))

    async def cards(self, caller: Caller) -> Sequence[Card]:
        return [card_of(each) for each in self._mine(caller)]

    async def details(self, name: str, caller: Caller) -> Details:
        return details_of(self._named(name, caller))

    async def in_memory(self, caller: Caller) -> Sequence[Loaded]:
        """Describe the model, unless it sleeps."""
        return [
            Loaded(card=card_of(each), n_ctx=each.model.n_ctx_seq, expires=_expires(each))
            for each in self._mine(caller)
            if not each.lifecycle.sleeping
        ]

    async def properties(self, query: Mapping[str, str], caller: Caller) -> Reply:
        return json(properties_of(self._usable(caller)))

    async def metrics(self, query: Mapping[str, str], caller: Caller) -> Reply:
        server, measured = self._measured()
        own = measured.render(await server.status())
        return Data(
            body=own + await metrics.render(self, caller),
            headers={"Process-Start-Time-Unix": str(int(measured.started))},
            content_type=metrics.CONTENT_TYPE,
        )

    async def snapshot(self, query: Mapping[str, str], caller: Caller) -> Reply:
        server, measured = self._measured()
        return json(measured.snapshot(await server.status()))

    def _measured(self) -> tuple[Server, Metrics]:
        """The server and its metrics. Raises NotSupportedError where there are none."""
        metrics.check(self.config)
        server = self.server
        assert server.metrics is not None
        return server, server.metrics

    async def load(self, name: str, caller: Caller, *, args: tuple[str, ...] = ()) -> None:
        """Load the model, if it sleeps, and wait for that. Raises as `check_ready`."""
        server = self._named(name, caller)
        if args:
            raise _only_one()
        await caller.keep_awake(server, caller.context())
        self.check_ready()

    async def unload(self, name: str, caller: Caller) -> None:
        """Put the model to sleep once no request runs, and wait for that."""
        await self._named(name, caller).sleep()

    async def download(self, name: str, caller: Caller, *, again: bool = False) -> str:
        """Refuse to download a model."""
        raise _only_one()

    @property
    def prospects(self) -> Prospects:
        """Refuse: the model is chosen."""
        raise _only_one()

    async def remove(self, name: str, caller: Caller) -> None:
        """Refuse to delete the model."""
        self._named(name, caller)
        raise NotSupportedError(
            f"This server runs {name!r}, so it does not delete it; the command 'trioserve rm' "
            "removes models that were pulled."
        )

    def news(self) -> AbstractContextManager[Feed[FleetEvent]]:
        """Refuse to follow the model."""
        raise _only_one()


def _is_named(server: Server, name: str) -> bool:
    """True if the model of a server has a name. Ollama's tag "latest" is ignored."""
    return not {name, name.removesuffix(":latest")}.isdisjoint(server.model.names)


def _only_one() -> NotSupportedError:
    return NotSupportedError(
        "This server has one model, and /health and /props tell its state. To use more, run "
        "'trioserve pull', and start the server without a model: it serves all that are downloaded."
    )


def card_of(server: ModelServer) -> Card:
    """Describe the file of a server's model."""
    info = server.model.info
    return Card(
        name=info.name,
        size=info.size,
        modified=info.modified,
        architecture=info.metadata.get("general.architecture", ""),
        n_params=info.n_params,
        quantization=info.ftype,
    )


def details_of(server: ModelServer) -> Details:
    """Describe the model of a server by all that is known of it."""
    model = server.model
    return Details(
        card=card_of(server),
        path=model.info.path,
        template=model.template.source,
        metadata=model.info.metadata,
        defaults=model.defaults,
        n_ctx=model.n_ctx_seq,
        abilities=_abilities(model),
    )


def _expires(server: Server) -> float | None:
    """When an idle model goes to sleep, as `Loaded` has it."""
    seconds = server.lifecycle.idle_until - trio.current_time()
    return time.time() + seconds if math.isfinite(seconds) else None


def _abilities(model: LoadedModel) -> Sequence[str]:
    if model.pooling is not None:
        return ["embedding"] if model.pooling != "rank" else []
    fills_gaps = not missing_tokens(model.vocab)
    return abilities(model.template, fills_gaps=fills_gaps, modalities=model.modalities)
