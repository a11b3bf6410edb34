"""`ServerLife`: how a server begins, falls asleep, wakes up and ends."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import structlog
import trio
from trio_util import AsyncValue

from trioserve import llama
from trioserve.config import Config
from trioserve.errors import (
    ConfigError,
    EngineError,
    ServerClosingError,
    ServerSleepingError,
)
from trioserve.server.concurrency import EnteredOnce, alongside
from trioserve.server.context import RequestContext, refuse, take_context
from trioserve.server.generation.requests import Common
from trioserve.server.lifecycle.engine import Driver, Health, Loader, in_thread, running_engine
from trioserve.server.lifecycle.keeper import Keeper, ServerState
from trioserve.server.lifecycle.parts import Parts
from trioserve.server.limits.memory import MemoryBudget, release_memory
from trioserve.server.model import LoadedModel
from trioserve.server.observers.metrics import Metrics
from trioserve.server.observers.observer import Observer, RequestLog
from trioserve.server.observers.telemetry import Telemetry
from trioserve.server.runs.run import Runs
from trioserve.tools.registry import ToolRegistry, open_registry
from trioserve.types import EngineCounters, EngineStatus

_log = structlog.stdlib.get_logger("trioserve.server")


class ServerLife(EnteredOnce):
    """What a `Server` is, whatever it is asked for: its model is loaded, or the server sleeps."""

    def __init__(
        self,
        config: Config | None = None,
        *,
        load: Loader = llama.load,
        drive: Driver = in_thread,
        asleep: bool = False,
        room: Callable[[], AbstractAsyncContextManager[None]] = nullcontext,
    ) -> None:
        self.config = config or Config()
        if self.config.rpc and load is llama.load:
            raise ConfigError("rpc: a machine that fails ends the process, so such a model needs "
                              "one of its own: use the command, or ChildModels")  # fmt: skip
        #: What requests may hold, those of other connections that are not read yet included.
        self.memory = MemoryBudget.of(self.config)
        self.load_progress = 0.0
        #: Counts what the requests do; none unless the configuration says so.
        self.metrics = Metrics() if self.config.metrics_endpoint else None
        #: Who is told when a request starts and ends.
        self.observers: list[Observer] = [RequestLog()]
        if self.metrics is not None:
            self.observers.append(self.metrics)
        #: Tells functions of a program what happens; see `Telemetry.subscribe`.
        self.telemetry = Telemetry(self.observers)
        self._load = load
        self._drive = drive
        self._room = room
        self._begun = asleep  # it was loaded, or need not be
        self._keeper = Keeper(
            self._engine,
            self._remember,
            self._rest,
            keep_alive=self.config.sleep_idle_seconds,
            max_waiting=self.config.max_queue + self.config.parallel,
        )
        #: What outlasts an engine.
        self.common = Common(
            config=self.config,
            memory=self.memory,
            observers=self.observers,
            in_use=self._keeper.in_use,
        )
        #: The tools that the configuration allows, while the server runs. They need no model.
        self.tools = ToolRegistry()
        #: The answers for which tools are run.
        self.runs = Runs()
        self._draining = False
        self._failure: AsyncValue[EngineError | None] = AsyncValue(None)
        # Of the last engine:
        self._model: LoadedModel | None = None
        self._status: EngineStatus | None = None  # before it ended, to fall asleep
        self._scales: tuple[float, ...] = ()  # of its adapters, then
        self._before = EngineCounters()  # what earlier engines had done

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        async with (
            self._traced(),
            open_registry(self.config) as self.tools,
            alongside(self.memory.keep_trim),
            alongside(self._keeper.run),
        ):
            if not self._begun:
                await self.wake()
            await self.tools.listed()
            try:
                yield
            finally:
                self.runs.end_all("The server was closed.")
            await self._keeper.close()

    @asynccontextmanager
    async def _traced(self) -> AsyncIterator[None]:
        """Have the requests traced, if the configuration says so, for as long as a block lasts."""
        if not self.config.otel:
            yield
            return
        exporting = await trio.to_thread.run_sync(_import_exporting)
        async with exporting(content=self.config.otel_content) as observer:
            self.observers.append(observer)
            try:
                yield
            finally:
                self.observers.remove(observer)

    # -- one engine

    @asynccontextmanager
    async def _engine(self) -> AsyncIterator[Parts]:
        """Load the model, and run its engine for as long as a block lasts.

        Raises:
            ModelLoadError: from the loader.
            ConfigError: there is no such strategy.
            BridgeError: the system has no descriptors left.
        """
        began = trio.current_time()
        self.load_progress = 0.0
        running = running_engine(self.config, self._load, self._drive, self._note_progress)
        async with self._room(), running as (loop, dispatcher):
            introduce = partial(LoadedModel.introduce, loop, self.config)
            model = await trio.to_thread.run_sync(introduce)
            parts = Parts(self.common, model, loop, dispatcher)
            parts.admission.draining = self._draining
            if self._status is not None:
                self._before = self._status.counters
                parts.adapters.set(dict(enumerate(self._scales)))
                _log.info("awake", model=model.info.name, seconds=_seconds_since(began))
            self._model, self._begun = model, True
            if self.metrics is not None:
                self.metrics.model_name = model.info.name
                self.metrics.adapters = [Path(one.path).stem for one in loop.adapters]
            self.telemetry.attach(loop)
            async with (
                alongside(dispatcher.run),
                alongside(parts.health.run),
                alongside(partial(self._note_failure, parts.health)),
            ):
                try:
                    yield parts
                finally:
                    await parts.close()
                    self.telemetry.attach(None)

    def _note_progress(self, share: float) -> None:
        self.load_progress = share

    async def _note_failure(self, health: Health) -> None:
        self._failure.value = await health.wait_failure()

    async def _remember(self, parts: Parts) -> None:
        """Keep what will be asked for while the server sleeps."""
        status = await parts.health.status()
        self._status = attrs.evolve(
            status,
            # Their last tasks may be long.
            slots=tuple(attrs.evolve(slot, task=None) for slot in status.slots),
            counters=status.counters.after(self._before),
        )
        self._scales = parts.adapters.scales

    async def _rest(self) -> None:
        """Give back what an engine leaves behind."""
        self._model = self.model.asleep()
        await trio.to_thread.run_sync(release_memory)
        _log.info("asleep", model=self.model.info.name)

    # -- sleep

    @property
    def state(self) -> AsyncValue[ServerState]:
        """What the model does, as a value that can be waited for. Do not change it."""
        return self._keeper.state

    @property
    def sleeping(self) -> bool:
        """Whether the model is not in memory, and is loaded when somebody needs it.

        So it is until it has been loaded again.
        """
        closed = self.state.value is ServerState.CLOSED
        return self._keeper.current is None and self._begun and not closed

    @property
    def idle_since(self) -> float | None:
        """When the model was used last (`trio.current_time`); None: it is in use, or not loaded."""
        return self._keeper.idle_since

    @property
    def idle_until(self) -> float:
        """When the memory is freed if nobody needs the model from now on (`trio.current_time`).

        Infinite: it is not.
        """
        return self._keeper.idle_until

    def awake(
        self, context: RequestContext | None = None, **fields: Any
    ) -> AbstractAsyncContextManager[None]:
        """Have the model in memory for as long as a block lasts. It is loaded if need be.

        All that needs the model does this by itself. Those who wait go on in the order in which
        they came. A cancelled one does not end the loading.

        Args:
            context: until when to wait, and for how long the model stays idle in memory afterwards.
            fields: single fields of the context, by name.

        Raises:
            ModelLoadError: the model cannot be loaded; the next call has it tried again.
            DeadlineExceededError: the time has passed before it was.
            QueueFullError: too many wait already.
            ServerClosingError: the server sleeps, and drains or is closed.
        """
        context = take_context(fields, context)
        refuse(fields)
        return self._keeper.use(deadline=context.deadline, keep_alive=context.keep_alive)

    async def wake(self, context: RequestContext | None = None, **fields: Any) -> None:
        """Load the model if the server sleeps. Arguments and errors are those of `awake`."""
        async with self.awake(context, **fields):
            pass

    async def sleep(self) -> None:
        """Free the model's memory as soon as no request runs; returns when that is done.

        The next request loads the model again. What the caches held is gone by then. When
        cancelled, the server stays awake, unless it is falling asleep already. Inside `awake` it
        would wait for itself.
        """
        await self._keeper.end()

    # -- what the server is made of

    @property
    def parts(self) -> Parts:
        """What the server is made of while its model is loaded.

        Raises:
            ServerSleepingError: it sleeps; `awake` wakes it.
            ServerClosingError: its model was never loaded.
        """
        parts = self._keeper.current
        if parts is None:
            raise ServerSleepingError if self.sleeping else ServerClosingError
        return parts

    @property
    def model(self) -> LoadedModel:
        """What is known of the model, also while the server sleeps.

        Raises:
            ServerSleepingError: it was never loaded, because the server began asleep.
            ServerClosingError: it was never loaded.
        """
        if self._model is None:
            raise ServerSleepingError if self.sleeping else ServerClosingError
        return self._model

    async def known_model(self, context: RequestContext | None = None) -> LoadedModel:
        """What is known of the model, which is loaded if it never was. Arguments as in `awake`."""
        if self._model is None and self.sleeping:
            await self.wake(context)
        return self.model

    @property
    def ready(self) -> bool:
        """Whether the model is loaded and the server not closed."""
        parts = self._keeper.current
        return parts is not None and not parts.admission.closed

    @property
    def draining(self) -> bool:
        """Whether `drain` was called."""
        return self._draining

    async def drain(self, timeout: float) -> None:
        """Refuse new requests and let the running ones finish, for `timeout` seconds at most.

        Those that run on are ended: their readers get a `ServerClosingError`. So are, at once,
        those that wait for the model to be loaded. When cancelled, the server stays closed for new
        requests and nothing is ended.
        """
        self._draining = True
        self._keeper.refuse()
        message = f"The server shut down, {timeout:g} seconds after it was told to."
        if not self.sleeping:
            self.parts.admission.draining = True
        with trio.move_on_after(timeout) as scope:
            await self.runs.wait_none()
            if not self.sleeping:
                await self.parts.requests.wait_none()
        if scope.cancelled_caught:
            self.runs.end_all(message)
            if not self.sleeping:
                self.parts.requests.end_all(message)

    # -- a look at it

    async def status(self) -> EngineStatus:
        """Look at the slots and the queue, between two steps; in a long step, at an earlier look.

        While the server sleeps, they are as they were before, without the last tasks of slots. The
        counters go on where they were when it wakes.

        Raises:
            ServerClosingError: the server is closed.
        """
        if self.sleeping:
            await trio.lowlevel.checkpoint()
            return self._status or EngineStatus(slots=(), waiting=())
        with self._keeper.in_use(counts=False):
            status = await self.parts.health.status()
            return attrs.evolve(status, counters=status.counters.after(self._before))

    def check_ready(self) -> None:
        """Look whether requests are taken. A server that sleeps takes them.

        Raises:
            UnavailableError: the engine has failed.
            ServerClosingError: the server drains, or is closed.
        """
        if self._draining:
            raise ServerClosingError
        if not self.sleeping:
            self.parts.health.check_ready()

    async def wait_failure(self) -> EngineError:
        """Wait until an engine has failed; returns with what. Its requests have been told."""
        await self._failure.wait_value(lambda failure: failure is not None)
        failure: EngineError = self._failure.value
        return failure


def _import_exporting() -> Callable[..., AbstractAsyncContextManager[Observer]]:
    """Import what takes a while to import, and is not always installed."""
    from trioserve.server.observers.otel import exporting

    return exporting


def _seconds_since(began: float) -> float:
    return round(trio.current_time() - began, 3)
