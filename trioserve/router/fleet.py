"""`Fleet`: the processes of many models, each of which is started when a request needs it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)

import attrs
import trio

from trioserve.errors import (
    ConfigError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotLoadedError,
    ServerClosingError,
    UnknownModelError,
)
from trioserve.models.catalog import Catalog, ModelEntry
from trioserve.router.child import Child, HealthCheck
from trioserve.router.forward import ChildAnswer, ChildConnection, NotTakenError, Outgoing, connect
from trioserve.router.launch import Launcher, open_launcher, socket_folder
from trioserve.router.schedule import Lease, Schedule
from trioserve.router.states import Events, FleetEvent, ModelState, QueueStatus, Status
from trioserve.router.supervisor import FleetSupervisor, Record, too_often
from trioserve.server.concurrency import EnteredOnce, alongside

__all__ = ["Child", "Fleet"]

#: Seconds that processes have to end after their requests, when all are drained.
_GRACE = 5.0

#: Seconds between two times that requests which wait are told where they stand.
_NEWS_INTERVAL = 0.1


class Fleet(EnteredOnce):
    """The models of a catalog, each in a process of its own.

    Inside ``async with Fleet(catalog) as fleet:``, ``async with fleet.use(entry) as child:`` gives
    a process that has the model ready, and keeps it from being stopped for another model. Leaving
    kills the processes that still run; call `drain` before to let their requests finish.

    Args:
        catalog: the models.
        max_models: how many processes may run; 0: any number.
        max_memory: bytes that they may need together, by llama.cpp's estimate; 0: any number.
        drain_timeout: seconds that requests have to finish in `drain`.
        launcher: starts processes; the default forks one that has imported everything, if it can.
        watch: how processes are watched.

    Raises:
        ConfigError: on entry, when more models are to be loaded on startup than may run, or the
            system has no Unix sockets.
    """

    def __init__(
        self,
        catalog: Catalog,
        *,
        max_models: int = 4,
        max_memory: int = 0,
        drain_timeout: float = 30.0,
        launcher: Launcher | None = None,
        watch: HealthCheck | None = None,
    ) -> None:
        self.catalog = catalog
        self.max_models = max_models
        self._drain_timeout = drain_timeout
        self._launcher = launcher
        self._watch = watch or HealthCheck()
        self._schedule = Schedule(max_models=max_models, max_memory=max_memory)
        self._events = Events()
        self._listeners: set[_Bell] = set()  # of those who want to know where they stand
        self._news = _Bell()
        self._supervisor: FleetSupervisor | None = None
        self._closed = False

    # -- life

    @asynccontextmanager
    async def _live(self) -> AsyncIterator[None]:
        if not hasattr(socket, "AF_UNIX"):
            raise ConfigError("several models need Unix sockets; name one model with -m")
        at_once = [one for one in self.catalog.entries.values() if one.load_on_startup]
        if 0 < self.max_models < len(at_once):
            raise ConfigError(
                f"{len(at_once)} models are to be loaded on startup, but --models-max allows only "
                f"{self.max_models}"
            )
        async with AsyncExitStack() as stack:
            folder = stack.enter_context(socket_folder())
            launcher = await stack.enter_async_context(self._open_launcher())
            self._supervisor = supervisor = FleetSupervisor(
                self._schedule,
                launcher,
                self._watch,
                folder=folder,
                tell=self.tell,
                changed=self._news.ring,
            )
            for entry in at_once:
                supervisor.record(entry)
                self._schedule.want(entry.name)
            await stack.enter_async_context(alongside(supervisor.run))
            await stack.enter_async_context(alongside(self._tell_waiting))
            await supervisor.running.wait()
            stack.callback(self._close)
            yield

    def _open_launcher(self) -> AbstractAsyncContextManager[Launcher]:
        if self._launcher is not None:
            return nullcontext(self._launcher)
        return open_launcher(self.catalog.environment)

    async def _tell_waiting(self) -> None:
        """Have those who wait look where they stand, when that may have changed."""
        while True:
            await self._news.wait()
            for bell in list(self._listeners):
                bell.ring()
            await trio.sleep(_NEWS_INTERVAL)

    def _close(self) -> None:
        self._closed = True
        self._parts.close(ServerClosingError())

    async def drain(self) -> None:
        """Take nothing new, have all processes finish their requests, and wait for their end.

        What is left after `drain_timeout` is killed.
        """
        self._close()
        children = [one.child for one in self._parts.records.values() if one.child is not None]
        for child in children:
            child.stop(self._drain_timeout + _GRACE)
        for child in children:
            await child.finished.wait()

    @property
    def _parts(self) -> FleetSupervisor:
        """Raises ServerClosingError before the fleet is entered."""
        if self._supervisor is None:
            raise ServerClosingError
        return self._supervisor

    # -- what requests do

    @asynccontextmanager
    async def use(
        self,
        entry: ModelEntry,
        *,
        autoload: bool = True,
        on_wait: Callable[[QueueStatus], None] | None = None,
    ) -> AsyncIterator[Child]:
        """Wait until a model is ready, and keep it for the length of the block.

        Args:
            entry: the model, from the catalog.
            autoload: whether it may be started for this.
            on_wait: called with where the request stands, at first and when that changes.

        Raises:
            ModelNotLoadedError: it is not loaded, and may not be.
            ModelLoadError: it cannot be loaded.
            ModelFailedError: its processes have died too often.
            ServerClosingError: the fleet is closing.
        """
        record = self._usable(entry, autoload)
        bell = _Bell()
        child = None

        def changed() -> None:
            nonlocal child
            child = record.child  # now: it may have died before the request goes on
            bell.ring()

        lease = self._schedule.join(entry.name, changed)
        try:
            if not lease.granted:
                self._parts.turn()
                await self._until_granted(lease, bell, on_wait)
            record.use()
            assert child is not None
            yield child
        finally:
            record.use()
            self._schedule.leave(lease)
            self._parts.turn()

    def _usable(self, entry: ModelEntry, autoload: bool) -> Record:
        """The record of a model that may be used. Raises as `use`."""
        if self._closed:
            raise ServerClosingError
        record = self._parts.record(entry)
        runs = record.child is not None and not record.child.asked
        if not runs and not autoload:
            raise ModelNotLoadedError(f"The model {entry.name!r} is not loaded.", param="model")
        if not runs and record.deaths.wait_s(trio.current_time()):
            raise too_often(record)
        return record

    def is_ready(self, entry: ModelEntry) -> bool:
        """Whether a request that comes now would not have to wait for the model."""
        return not self._closed and self._schedule.is_free(entry.name)

    async def _until_granted(
        self, lease: Lease, bell: _Bell, on_wait: Callable[[QueueStatus], None] | None
    ) -> None:
        if on_wait is not None:
            self._listeners.add(bell)
        try:
            while not lease.granted:
                if lease.error is not None:
                    raise lease.error.with_traceback(None)
                if on_wait is not None:
                    on_wait(self._waiting(lease))
                await bell.wait()
        finally:
            self._listeners.discard(bell)

    def _waiting(self, lease: Lease) -> QueueStatus:
        record = self._parts.records[lease.model]
        is_next = self._schedule.is_loading(lease.model)
        return QueueStatus(
            position=self._schedule.position(lease),
            status=record.known.value if is_next else Status.UNLOADED,
            progress=record.known.progress if is_next else None,
        )

    # -- what others ask for

    async def load(self, entry: ModelEntry) -> None:
        """Begin to load a model. One that has failed gets another chance.

        Raises:
            InvalidRequestError: it is loaded already, or will be.
            ServerClosingError: the fleet is closing.
        """
        if self._closed:
            raise ServerClosingError
        record = self._parts.record(entry)
        if record.child is not None and not record.child.asked:
            raise InvalidRequestError(f"The model {entry.name!r} is running already.")
        record.deaths.forget()
        self._schedule.release(entry.name)
        self._schedule.want(entry.name)
        self._parts.turn()

    async def unload(self, entry: ModelEntry) -> None:
        """Begin to stop a model, which gets its `stop_timeout`. One that still loads is killed.

        Raises:
            InvalidRequestError: it is not running, and nobody waits for it.
        """
        record = self._parts.record(entry)
        if record.child is None and not self._schedule.is_queued(entry.name):
            raise InvalidRequestError(f"The model {entry.name!r} is not running.")
        error = ModelLoadError(f"The model {entry.name!r} was unloaded before it was ready.")
        if self._schedule.unload(entry.name, error):
            self._parts.stop(record)
        self._parts.turn()

    async def reload(self) -> None:
        """Read the catalog again, and wait until what has changed or is gone is not running.

        A model that has changed is started again for those who wait for it.

        Raises:
            ConfigError: as `Catalog.reload`.
        """
        changes = await trio.to_thread.run_sync(self.catalog.reload)
        records, ending = self._parts.records, []
        for name, record in list(records.items()):
            record.entry = self.catalog.entries.get(name, record.entry)
            if name in changes.removed:
                del records[name]
                gone = UnknownModelError(f"The model {name!r} is no longer there.", param="model")
                must_stop = self._schedule.unload(name, gone)
            elif name in changes.changed:
                record.deaths.forget()
                must_stop = self._schedule.stop(name)
            else:
                continue
            self._schedule.forget(name)
            if must_stop:
                self._parts.stop(record)
            if record.child is not None:
                ending.append(record.child)
        self._parts.turn()
        for child in ending:
            await child.finished.wait()
        self.tell(FleetEvent(model="*", event="models_reload"))

    # -- what is to be seen

    def state(self, name: str) -> ModelState:
        """A model as it is now."""
        record = self._parts.records.get(name)
        if record is None:
            return ModelState()
        return attrs.evolve(
            record.known,
            pid=record.child.pid if record.child is not None else None,
            last_used=record.last_used,
            n_requests=self._schedule.n_users(name),
            n_waiting=sum(1 for _ in self._schedule.waiting(name)),
            memory=self._schedule.need_of(name),
        )

    def subscribe(self) -> AbstractAsyncContextManager[trio.MemoryReceiveChannel[FleetEvent]]:
        """Receive what happens from now on, for the length of a block."""
        return self._events.subscribe()

    def tell(self, event: FleetEvent) -> None:
        """Tell those who have subscribed of an event that is not the fleet's own."""
        self._events.tell(event)


class _Bell:
    """Wakes a task. Rings that come before it waits count as one."""

    def __init__(self) -> None:
        self._rung = trio.Event()

    def ring(self) -> None:
        self._rung.set()

    async def wait(self) -> None:
        await self._rung.wait()
        self._rung = trio.Event()


@asynccontextmanager
async def connected(
    fleet: Fleet,
    entry: ModelEntry,
    *,
    autoload: bool = True,
    on_wait: Callable[[QueueStatus], None] | None = None,
) -> AsyncIterator[ChildConnection]:
    """Wait until a model is ready, and connect to it; both for the length of the block.

    A process may have died a moment ago, and the fleet not know it yet. Nothing was sent to it
    then, so the request waits for the next one. Arguments are those of `Fleet.use`.

    Raises:
        TrioServeError: as `Fleet.use`; or the process takes no more connections.
    """
    while True:
        async with AsyncExitStack() as stack:
            child = await stack.enter_async_context(
                fleet.use(entry, autoload=autoload, on_wait=on_wait)
            )
            if (connection := _connect(child, stack)) is not None:
                yield connection
                return
        await child.ended.wait()


def _connect(child: Child, stack: AsyncExitStack) -> ChildConnection | None:
    """Connect to a process; None: it has ended. Raises NotTakenError: it has too many requests."""
    try:
        return stack.enter_context(connect(child.socket_path, child.kept, child.ended))
    except NotTakenError as error:
        if isinstance(error.__cause__, ConnectionRefusedError | FileNotFoundError):
            return None
        raise


@asynccontextmanager
async def send_to_model(
    fleet: Fleet,
    entry: ModelEntry,
    write: Callable[[], Awaitable[Outgoing]],
    *,
    on_wait: Callable[[QueueStatus], None] | None = None,
) -> AsyncIterator[ChildAnswer]:
    """Wait until a model is ready, and send it a request; gives the answer, once its head is there.

    Args:
        fleet: has the model.
        entry: the model.
        write: writes the request when the model is ready; again, if a process has not taken it.
        on_wait: as for `Fleet.use`.

    Raises:
        TrioServeError: as `connected`, and as `write`; the process ended before it had answered.
    """
    while True:
        async with connected(fleet, entry, on_wait=on_wait) as connection:
            try:
                answer = await connection.ask(await write())
            except NotTakenError:
                continue
            yield answer
            return
