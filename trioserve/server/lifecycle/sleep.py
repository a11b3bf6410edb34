"""Loads the model when a request needs it, and frees it when it is idle."""

from __future__ import annotations

import enum
import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from functools import partial

import attrs
import trio
from trio_util import AsyncValue

from trioserve.concurrency import Bell, Gate, Phase, alongside, deadline_scope, run_in_worker
from trioserve.errors import (
    EngineError,
    QueueFullError,
    ServerClosingError,
    ServerSleepingError,
    TrioServeError,
    UnavailableError,
)
from trioserve.left_out import leave_out
from trioserve.log import get_logger
from trioserve.server.context import ANYONE, RequestContext
from trioserve.server.generation.requests import ServerResources
from trioserve.server.lifecycle.adapters import LoadedAdapters
from trioserve.server.lifecycle.engine import Driver, Health, Loader, running_engine
from trioserve.server.lifecycle.services import EngineServices
from trioserve.server.lifecycle.speech import speech_of
from trioserve.server.limits.memory import release_memory
from trioserve.server.model import LoadedModel
from trioserve.types import EngineStatus

_log = get_logger("trioserve.server")

#: Seconds after which a client may retry when too many requests wait for the model.
_RETRY_AFTER = 5.0


class ServerState(enum.Enum):
    """The state of a server's model."""

    LOADING = "loading"
    READY = "ready"
    SLEEPING = "sleeping"  # not in memory; a request loads it
    CLOSED = "closed"


@attrs.define(eq=False, slots=False)
class ModelLifecycle:
    """Loads the model when a request needs it, and frees it after an idle time.

    Requests wait while the model is not loaded, and continue in the order of arrival. If loading
    fails, all waiting requests get the error, and the next request tries again. A model in use is
    never freed.
    """

    _resources: ServerResources
    _load: Loader
    _drive: Driver
    _room: Callable[[], AbstractAsyncContextManager[None]]  # around the model's time in memory
    _begun: bool  # the first load has finished, or is not needed

    def __attrs_post_init__(self) -> None:
        #: Admits requests and runs with tools.
        self.gate = self._resources.gate
        self._is_open = False  # `Server` has entered its block
        #: The state of the model. It is in memory for a while before and after it has services.
        self.state: AsyncValue[ServerState] = AsyncValue(ServerState.SLEEPING)
        self._services: EngineServices | None = None
        #: Seconds that the idle model stays in memory. Below 0: for ever.
        self._keep_alive = -1.0
        self._start = Gate()  # the requests that wait for the next engine
        self._line = trio.Lock()  # their order
        self._n_users = 0  # includes requests that wait for the model
        self._n_told = 0  # `end` calls that wait for the engine to end
        self._last_used = -math.inf
        self._changed = Bell()  # rings when `_ends_at` is earlier than before
        #: Why the engine has failed. All requests have the error before.
        self.failure: AsyncValue[EngineError | None] = AsyncValue(None)
        # Kept from the last engine:
        self._model: LoadedModel | None = None
        self._status = EngineStatus(slots=(), waiting=())  # counts the work of all earlier engines
        self._scales: dict[str, float] | None = None  # the scales of its adapters
        #: The LoRA adapters by name.
        self.adapters = LoadedAdapters(
            self._resources.config,
            lambda: self.model.names,
            lambda: self.services,
            self._use_admitted,
        )

    def open(self) -> None:
        """Note that `Server` has entered its block."""
        self._is_open = True

    async def run(self) -> None:
        """Start and end engines, one at a time, until cancelled.

        Raises:
            Exception: an engine failed with it, or did not start for another reason than a
                `TrioServeError`.
        """
        try:
            while True:
                await self._start.n_open.wait_value(lambda n_waiting: n_waiting > 0)
                await self._run_one()
        finally:
            self.close()

    async def _run_one(self) -> None:
        self._enter(ServerState.LOADING)
        async with AsyncExitStack() as stack:
            try:
                services = await stack.enter_async_context(self._engine())
            except TrioServeError as error:
                if self._model is not None:
                    _log.error("the model cannot be loaded again", reason=error.message)
                self._enter(ServerState.SLEEPING)
                self._fail(error)
                return
            self._enter(ServerState.READY, services)
            await self._while_needed(services)
            self._services = None
        self._model = self.model.asleep()
        await run_in_worker(release_memory)
        _log.info("asleep", model=self.model.info.name)
        self._enter(ServerState.SLEEPING)

    def _enter(self, state: ServerState, services: EngineServices | None = None) -> None:
        if self.state.value is not ServerState.CLOSED:
            self._services = services
            self.state.value = state

    async def _while_needed(self, services: EngineServices) -> None:
        """Return when the model was idle for long enough."""
        self._keep_alive = self._resources.config.sleep_idle_seconds
        self._last_used = trio.current_time()
        while True:
            while (ends_at := self._ends_at) > trio.current_time():
                with trio.move_on_at(ends_at):
                    await self._changed.wait()
            status = await services.health.status()
            if self._ends_at <= trio.current_time():
                break  # no request came meanwhile, and no checkpoint follows until the end
        self._scales = services.adapters.by_name
        # The last tasks may be long.
        slots = tuple(attrs.evolve(slot, task=None) for slot in status.slots)
        self._status = attrs.evolve(status.after(self._status), slots=slots)

    @property
    def idle_since(self) -> float | None:
        """When the running engine was last used; None: it is in use, or none runs."""
        return self._last_used if self.ready and not self._n_users else None

    @property
    def _ends_at(self) -> float:
        """When the engine is to end, unless something changes."""
        if self._n_users:
            return math.inf
        return -math.inf if self._n_told else self.idle_until

    @property
    def idle_until(self) -> float:
        """When the engine ends without further requests; infinite: never."""
        last_used = trio.current_time() if self._n_users else self._last_used
        return math.inf if self._keep_alive < 0 else last_used + self._keep_alive

    def _fail(self, error: TrioServeError) -> None:
        """End the requests that wait for an engine."""
        failed, self._start = self._start, Gate()
        failed.end(error)

    def close(self) -> None:
        """End all requests, and refuse later ones. Cancel `run` to end the engine."""
        self.gate.end(ServerClosingError("The server was closed."))
        self._fail(ServerClosingError())
        self._enter(ServerState.CLOSED)

    # -- one engine

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[EngineServices]:
        """Load the model, and run its engine during a block.

        Raises:
            ModelLoadError: the loader failed.
            ConfigError: a configured strategy does not exist.
            BridgeError: no descriptors are left.
        """
        began = trio.current_time()
        config, telemetry = self._resources.config, self._resources.telemetry
        self.failure.value = None
        running = running_engine(config, self._load, self._drive, self.failure)
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(self._room())
            loop, dispatcher = await stack.enter_async_context(running)
            speaking = speech_of(self._resources, loop, self._drive)
            speech = await stack.enter_async_context(speaking)
            voices = None if speech is None else sorted(speech.voices)
            introduce = partial(LoadedModel.introduce, loop, config, voices)
            model = await trio.to_thread.run_sync(introduce)
            services = EngineServices(self._resources, model, loop, dispatcher, self._drive, speech)
            if self._model is not None:
                seconds = round(trio.current_time() - began, 3)
                _log.info("awake", model=model.info.name, seconds=seconds)
            self._model, self._begun = model, True
            if (metrics := self._resources.metrics) is not None:
                metrics.model_name = model.info.name
                metrics.adapters = services.adapters.names
            telemetry.attach(loop)
            async with alongside(
                dispatcher.run, dispatcher.watch, services.health.run, services.run
            ):
                try:
                    await self.adapters.restore(services, self._scales)
                    yield services
                finally:
                    await services.close()
                    telemetry.attach(None)

    async def wait_failure(self) -> EngineError:
        """Wait until an engine fails, and return the error."""
        failure: EngineError = await self.failure.wait_value(lambda error: error is not None)
        return failure

    # -- state

    @property
    def sleeping(self) -> bool:
        """True if the model is not in memory, and is loaded when a request needs it."""
        return self._begun and not self.ready and self.state.value is not ServerState.CLOSED

    @property
    def services(self) -> EngineServices:
        """The services of the loaded model. Raises as `model`."""
        if self._services is None:
            raise self._absence()
        return self._services

    @property
    def model(self) -> LoadedModel:
        """The loaded model's properties, also while it sleeps.

        Raises:
            ServerSleepingError: the server started asleep and has not loaded the model yet.
            ServerClosingError: the server closed before it loaded the model.
        """
        if self._model is None:
            raise self._absence()
        return self._model

    def _absence(self) -> TrioServeError:
        self._check_open()
        return ServerSleepingError() if self.sleeping else ServerClosingError()

    def _check_open(self) -> None:
        if not self._is_open:
            raise RuntimeError("this Server is not open: enter it with `async with`")

    async def known_model(self, context: RequestContext = ANYONE) -> LoadedModel:
        """The model's properties. Loads the model if it was never loaded."""
        if self._model is None and self.sleeping:
            async with self.use(context):
                pass
        return self.model

    @property
    def ready(self) -> bool:
        """True if the model is loaded and the server is open."""
        return self._services is not None

    async def drain(self, timeout: float) -> None:
        """See `Server.drain`."""
        self.gate.refuse()
        self._fail(ServerClosingError())
        await self.gate.drain(trio.current_time() + timeout, ServerClosingError.after(timeout))

    def check_ready(self) -> None:
        """Check that the server accepts requests. A sleeping server does.

        Raises:
            UnavailableError: the engine has failed.
            ServerClosingError: the server drains, or is closed.
        """
        self.gate.check()
        if not self.sleeping:
            self._check_engine()

    def check_live(self) -> None:
        """Check that the engine works, if there is one.

        Raises:
            UnavailableError: the engine has failed, or a step takes too long.
        """
        if self.ready:
            self._check_engine().check()

    def _check_engine(self) -> Health:
        health = self.services.health
        if (failure := self.failure.value) is not None:
            raise UnavailableError(failure.message)
        return health

    async def status(self) -> EngineStatus:
        """See `Server.status`."""
        if self.sleeping:
            await trio.lowlevel.checkpoint()
            return self._status
        with self.in_use(counts=False):
            status = await self.services.health.status()
            return status.after(self._status)

    # -- use of the engine

    @contextmanager
    def in_use(self, *, counts: bool = True) -> Iterator[None]:
        """Keep the running engine from ending during a block.

        Without `counts`, the block does not reset the idle time.
        """
        self._n_users += 1
        try:
            yield
        finally:
            self._n_users -= 1
            if counts:
                self._last_used = trio.current_time()
            if not self._n_users and (self._n_told or self._keep_alive >= 0):
                self._changed.ring()

    @asynccontextmanager
    async def use(
        self, context: RequestContext, check: Callable[[LoadedModel], None] | None = None
    ) -> AsyncIterator[EngineServices]:
        """See `Server.loaded`. A check raises if the model does not support the request."""
        if check is not None:
            check(await self.known_model(context))
        with self.in_use():
            if not self.ready or self._start.n_open.value:
                with deadline_scope(context.deadline):
                    await self._until_ready()
            if context.keep_alive is not None:
                self._keep(context.client, context.keep_alive)
            yield self.services

    @asynccontextmanager
    async def _use_admitted(self, context: RequestContext) -> AsyncIterator[EngineServices]:
        with self.gate.open():
            async with self.use(context, LoadedModel.check_generates) as services:
                yield services

    def _keep(self, client: str, keep_alive: float) -> None:
        """Set for how long the idle model stays. A key that may not manage can only prolong it."""
        keys = self._resources.keys
        key = None if keys is None else keys.find(client)
        may_shorten = not client or keys is None or (key is not None and key.may_manage)
        if may_shorten or keep_alive < 0 or 0 <= self._keep_alive <= keep_alive:
            self._keep_alive = keep_alive
        else:
            leave_out("keep_alive", "a key that may not manage the server cannot shorten it")

    async def _until_ready(self) -> None:
        """Have the model loaded, and wait for that in the order of arrival."""
        self._check_open()
        # Also for work that has begun: no engine starts any more.
        if self.gate.phase.value is not Phase.OPEN:
            raise ServerClosingError
        n_waiting, config = self._start.n_open.value, self._resources.config
        if n_waiting >= config.max_queue + config.parallel:
            wait = "request waits" if n_waiting == 1 else "requests wait"
            raise QueueFullError(
                f"{n_waiting} {wait} for the model to load, and the queue is full.",
                retry_after=_RETRY_AFTER,
            )
        with self._start.open():
            async with self._line:
                await self.state.wait_value(lambda _: self.ready)

    async def end(self) -> None:
        """End the engine as soon as it is unused, and wait until it has ended.

        When cancelled, the engine keeps running, unless it is ending already.
        """
        self._n_told += 1
        self._changed.ring()
        try:
            ended = (ServerState.SLEEPING, ServerState.CLOSED)
            await self.state.wait_value(lambda state: state in ended)
        finally:
            self._n_told -= 1
