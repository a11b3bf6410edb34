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
from pathlib import Path

import attrs
import structlog
import trio
from trio_util import AsyncValue

from trioserve.concurrency import Gate, alongside, deadline_scope
from trioserve.errors import (
    EngineError,
    QueueFullError,
    ServerClosingError,
    ServerSleepingError,
    TrioServeError,
)
from trioserve.server.context import RequestContext
from trioserve.server.generation.requests import ServerResources
from trioserve.server.lifecycle.engine import Driver, Loader, running_engine
from trioserve.server.lifecycle.services import EngineServices
from trioserve.server.limits.memory import release_memory
from trioserve.server.model import LoadedModel
from trioserve.types import EngineCounters, EngineStatus

_log = structlog.stdlib.get_logger("trioserve.server")

#: Seconds after which a client may retry when too many requests wait for the model.
_RETRY_AFTER = 5.0


class ServerState(enum.Enum):
    """The state of a server's model."""

    LOADING = "loading"
    READY = "ready"
    SLEEPING = "sleeping"  # not in memory; a request loads it
    CLOSED = "closed"


@attrs.define(eq=False)
class _Start:
    """The next start of an engine: its waiting requests, in order, and the error if it failed."""

    waiting: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    error: TrioServeError | None = None


class ModelLifecycle:
    """Loads the model when a request needs it, and frees it after an idle time.

    Requests wait while the model is not loaded, and continue in the order of arrival. If loading
    fails, all waiting requests get the error, and the next request tries again. A model in use is
    never freed.

    Args:
        resources: the server's resources.
        load: loads the model.
        drive: runs the engine.
        room: a context manager around the model's time in memory, which makes room for it.
        asleep: whether to start without loading the model.
    """

    def __init__(
        self,
        resources: ServerResources,
        load: Loader,
        drive: Driver,
        room: Callable[[], AbstractAsyncContextManager[None]],
        *,
        asleep: bool,
    ) -> None:
        config = resources.config
        self._resources = resources
        self._load = load
        self._drive = drive
        self._room = room
        self._begun = asleep  # the first load has finished, or is not needed
        #: Seconds that the idle model stays in memory. Below 0: for ever.
        self._default_keep_alive = self._keep_alive = config.sleep_idle_seconds
        self._max_waiting = config.max_queue + config.parallel
        #: The active runs with tools.
        self.runs = Gate()
        self.load_progress = 0.0
        self.state = AsyncValue(ServerState.SLEEPING)
        #: The services of the loaded model. Still set after the server has closed.
        self.current: EngineServices | None = None
        #: Whether new requests are rejected.
        self.draining = False
        self._next = _Start()
        self._refuses = False
        self._closing = False
        self._n_users = 0  # includes requests that wait for the model
        self._n_told = 0  # `end` calls that wait for the engine to end
        self._last_used = -math.inf
        self._changed = trio.Event()  # set when one of the fields above changes
        self._failure: AsyncValue[EngineError | None] = AsyncValue(None)
        # Kept from the last engine:
        self._model: LoadedModel | None = None
        self._status: EngineStatus | None = None  # its last status
        self._scales: tuple[float, ...] = ()  # the scales of its adapters
        self._before = EngineCounters()  # the totals of earlier engines

    async def run(self) -> None:
        """Start and end engines, one at a time, until closed or cancelled.

        Raises:
            Exception: an engine failed with it, or did not start for another reason than a
                `TrioServeError`.
        """
        try:
            while not self._closing:
                while not self._next.waiting:
                    await self._until_changed(math.inf)
                await self._run_one()
        finally:
            self.refuse()
            self.state.value = ServerState.CLOSED

    async def _run_one(self) -> None:
        self.state.value = ServerState.LOADING
        async with AsyncExitStack() as stack:
            try:
                self.current = await stack.enter_async_context(self._engine())
            except TrioServeError as error:
                if self._last_used > -math.inf:
                    _log.error("the model cannot be loaded again", reason=error.message)
                self.state.value = ServerState.SLEEPING
                self._fail(error)
                return
            await self._while_needed(self.current)
            if self._closing:
                return
            self.current = None
        await self._rest()
        self.state.value = ServerState.SLEEPING

    async def _while_needed(self, current: EngineServices) -> None:
        """Admit waiting requests, and return when the model was idle for long enough."""
        self._keep_alive = self._default_keep_alive
        self._last_used = trio.current_time()
        self.state.value = ServerState.READY
        self._next.waiting.unpark()  # each task wakes the next one
        while True:
            while trio.current_time() < self._ends_at:
                await self._until_changed(self._ends_at)
            if self._closing:
                return
            await self._remember(current)
            if trio.current_time() >= self._ends_at:
                return  # no request came meanwhile, and no checkpoint follows until the end

    @property
    def idle_since(self) -> float | None:
        """When the running engine was last used; None: it is in use, or none runs."""
        idle = self.state.value is ServerState.READY and not self._n_users
        return self._last_used if idle else None

    @property
    def _ends_at(self) -> float:
        """When the engine is to end, unless something changes."""
        if self._closing:
            return -math.inf
        if self._n_users:
            return math.inf
        if self._n_told:
            return -math.inf
        return self.idle_until

    @property
    def idle_until(self) -> float:
        """When the engine ends without further requests; infinite: never."""
        last_used = trio.current_time() if self._n_users else self._last_used
        return math.inf if self._keep_alive < 0 else last_used + self._keep_alive

    async def _until_changed(self, deadline: float) -> None:
        with trio.move_on_at(deadline):
            await self._changed.wait()
            self._changed = trio.Event()

    def _fail(self, error: TrioServeError) -> None:
        """Report to waiting requests that there is no engine."""
        failed, self._next = self._next, _Start()
        failed.error = error
        failed.waiting.unpark_all()

    def refuse(self) -> None:
        """Reject waiting and later requests for an engine with a `ServerClosingError`."""
        self._refuses = True
        self._fail(ServerClosingError())

    async def close(self) -> None:
        """Start no more engines, and end the running one, even if it is in use.

        An engine that is starting or ending stops when `run` is cancelled.
        """
        self.refuse()
        if self.current is not None:
            self._closing = True
            self._changed.set()
            await self.state.wait_value(ServerState.CLOSED)

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
        self.load_progress = 0.0
        config, telemetry = self._resources.config, self._resources.telemetry
        running = running_engine(config, self._load, self._drive, self._note_progress)
        async with self._room(), running as (loop, dispatcher):
            introduce = partial(LoadedModel.introduce, loop, config)
            model = await trio.to_thread.run_sync(introduce)
            services = EngineServices(self._resources, model, loop, dispatcher, self.in_use)
            services.admission.draining = self.draining
            if self._status is not None:
                self._before = self._status.counters
                services.adapters.set(dict(enumerate(self._scales)))
                seconds = round(trio.current_time() - began, 3)
                _log.info("awake", model=model.info.name, seconds=seconds)
            self._model, self._begun = model, True
            if (metrics := self._resources.metrics) is not None:
                metrics.model_name = model.info.name
                metrics.adapters = [Path(one.path).stem for one in loop.adapters]
            telemetry.attach(loop)
            note_failure = partial(self._note_failure, services)
            async with alongside(dispatcher.run, services.health.run, note_failure):
                try:
                    yield services
                finally:
                    await services.close()
                    telemetry.attach(None)

    def _note_progress(self, share: float) -> None:
        self.load_progress = share

    async def _note_failure(self, services: EngineServices) -> None:
        self._failure.value = await services.health.wait_failure()

    async def wait_failure(self) -> EngineError:
        """Wait until an engine fails, and return the error. All requests got it before."""
        await self._failure.wait_value(lambda failure: failure is not None)
        failure: EngineError = self._failure.value
        return failure

    async def _remember(self, services: EngineServices) -> None:
        """Keep the status and the scales for the time in which the server sleeps."""
        status = await services.health.status()
        self._status = attrs.evolve(
            status,
            # The last tasks may be long.
            slots=tuple(attrs.evolve(slot, task=None) for slot in status.slots),
            counters=status.counters.after(self._before),
        )
        self._scales = services.adapters.scales

    async def _rest(self) -> None:
        """Free the memory that an engine leaves behind."""
        self._model = self.model.asleep()
        await trio.to_thread.run_sync(release_memory)
        _log.info("asleep", model=self.model.info.name)

    # -- state

    @property
    def sleeping(self) -> bool:
        """Whether the model is not in memory, and is loaded when a request needs it."""
        closed = self.state.value is ServerState.CLOSED
        return self.current is None and self._begun and not closed

    @property
    def services(self) -> EngineServices:
        """The services of the loaded model. Raises as `model`."""
        if self.current is None:
            raise ServerSleepingError if self.sleeping else ServerClosingError
        return self.current

    @property
    def model(self) -> LoadedModel:
        """The loaded model's properties, also while it sleeps.

        Raises:
            ServerSleepingError: the server started asleep and has not loaded the model yet.
            ServerClosingError: the server closed before it loaded the model.
        """
        if self._model is None:
            raise ServerSleepingError if self.sleeping else ServerClosingError
        return self._model

    async def known_model(self, context: RequestContext | None = None) -> LoadedModel:
        """The model's properties. Loads the model if it was never loaded."""
        if self._model is None and self.sleeping:
            async with self.use(context or RequestContext()):
                pass
        return self.model

    @property
    def ready(self) -> bool:
        """Whether the model is loaded and the server is open."""
        return self.current is not None and not self.current.admission.closed

    async def drain(self, timeout: float) -> None:
        """See `Server.drain`."""
        self.draining = True
        self.refuse()
        runs = self.runs
        if not self.sleeping:
            self.services.admission.draining = True
        with trio.move_on_after(timeout) as scope:
            await runs.drained()
            if not self.sleeping:
                await self.services.requests.wait_none()
        if scope.cancelled_caught:
            message = f"The server shut down, {timeout:g} seconds after draining started."
            runs.end(ServerClosingError(message))
            if not self.sleeping:
                self.services.requests.end_all(message)

    def check_ready(self) -> None:
        """Check that the server accepts requests. A sleeping server does.

        Raises:
            UnavailableError: the engine has failed.
            ServerClosingError: the server drains, or is closed.
        """
        if self.draining:
            raise ServerClosingError
        if not self.sleeping:
            self.services.health.check_ready()

    def check_live(self) -> None:
        """Check that the engine works, if there is one.

        Raises:
            UnavailableError: the engine has failed, or a step takes too long.
        """
        if self.current is not None and self.ready:
            self.current.health.check_live()

    async def status(self) -> EngineStatus:
        """See `Server.status`."""
        if self.sleeping:
            await trio.lowlevel.checkpoint()
            return self._status or EngineStatus(slots=(), waiting=())
        with self.in_use(counts=False):
            status = await self.services.health.status()
            return attrs.evolve(status, counters=status.counters.after(self._before))

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
            if not self._n_users:
                self._changed.set()

    @asynccontextmanager
    async def use(
        self, context: RequestContext, check: Callable[[LoadedModel], None] | None = None
    ) -> AsyncIterator[EngineServices]:
        """See `Server.awake`. A check raises if the model does not support the request."""
        if check is not None:
            check(await self.known_model(context))
        with self.in_use():
            if self.current is None or self._next.waiting:
                await self._until_started(context.deadline)
            if context.keep_alive is not None:
                self._keep_alive = context.keep_alive
            yield self.services

    async def _until_started(self, deadline: float) -> None:
        start = self._next
        if self._refuses:
            raise ServerClosingError
        if len(start.waiting) >= self._max_waiting:
            n_waiting = len(start.waiting)
            wait = "request waits" if n_waiting == 1 else "requests wait"
            raise QueueFullError(
                f"{n_waiting} {wait} for the model to load, and the queue is full.",
                retry_after=_RETRY_AFTER,
            )
        self._changed.set()
        with deadline_scope(deadline):
            await start.waiting.park()
        if start.error is not None:
            raise start.error.again()
        start.waiting.unpark()

    async def end(self) -> None:
        """End the engine as soon as it is unused, and wait until it has ended.

        When cancelled, the engine keeps running, unless it is ending already.
        """
        self._n_told += 1
        self._changed.set()
        try:
            await self.state.wait_value(
                lambda state: state in (ServerState.SLEEPING, ServerState.CLOSED)
            )
        finally:
            self._n_told -= 1
