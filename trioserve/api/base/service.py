"""`Service`: the life of a `Server` within the life of an app."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import trio
from quart import current_app

from trioserve.api.base.app_state import AppState, Responses, app_state_of
from trioserve.api.base.body import read_body_as
from trioserve.api.base.connection import current_request
from trioserve.api.base.rights import check_model, may_use
from trioserve.config import Config
from trioserve.errors import UnavailableError
from trioserve.models.fetch import fetch
from trioserve.server.context import ANYONE, RequestContext
from trioserve.server.lifecycle.engine import Loader
from trioserve.server.limits.memory import MemoryBudget
from trioserve.server.observers.observer import Observer
from trioserve.server.server import Server
from trioserve.tools.registry import ToolRegistry

_T = TypeVar("_T")

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
        self.responses = Responses()
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
        """The tools that the server runs. Raises as `server`."""
        return self.server.tools

    @property
    def observers(self) -> Sequence[Observer]:
        """The observers of the server. Raises as `server`."""
        return self.server.observers

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


def current_service() -> Service:
    """The service of the app that handles the current request."""
    service = app_state_of(current_app)
    assert isinstance(service, Service)
    return service


def current_server() -> Server:
    """The server of the app that handles the current request. It may sleep.

    Raises:
        TrioServeError: as `Service.server`.
    """
    return current_service().server


def may_use_model_of(server: Server) -> bool:
    """Whether the API key of the current request may use the model of a server."""
    return may_use(*server.model.names)


def server_for(model: str | None) -> Server:
    """The server of a model that the current request is to use. It may sleep.

    Args:
        model: the name that the request gives. There is one model, which answers to any.

    Raises:
        PermissionDeniedError: the API key may not use the model.
        TrioServeError: as `Service.server`.
    """
    server = current_server()
    check_model(*server.model.names)
    return server


async def awake_server(model: str | None = None, context: RequestContext | None = None) -> Server:
    """The server of a model, awake until the current request has been answered.

    Raises:
        TrioServeError: as `server_for` and `Server.loaded`.
    """
    server = server_for(model)
    await keep_awake(server, context)
    return server


async def keep_awake(server: Server, context: RequestContext | None = None) -> None:
    """Keep a server awake until the current request has been answered; see `Server.loaded`."""
    await current_request().resources.enter_async_context(server.loaded(context or ANYONE))


async def read_for_model(
    parse: Callable[[dict[str, Any]], _T], check: Callable[[Server], object]
) -> tuple[_T, Server]:
    """Read a body that is for a model of a certain kind, and find the server of that model.

    Args:
        parse: parses the body further; it may run in a thread.
        check: raises if the model that the body names is of another kind. That comes before
            whatever else is wrong with the body.

    Raises:
        InvalidRequestError: it is not a JSON object; or from `parse`.
        RequestEntityTooLarge: it is larger than the app allows.
        TrioServeError: from `check`; there is no server; requests hold too much memory.
    """

    def parse_checked(body: dict[str, Any]) -> tuple[_T, Server]:
        name = body.get("model")
        server = server_for(name if isinstance(name, str) else None)
        check(server)
        return parse(body), server

    return await read_body_as(parse_checked)


def current_responses() -> Responses:
    """The responses of the app that handles the current request."""
    return current_service().responses
