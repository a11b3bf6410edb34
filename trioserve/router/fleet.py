"""`Fleet`: the processes of many models, each started when a request needs it."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from contextvars import Context, copy_context
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import structlog
import trio

from trioserve.concurrency import EnteredOnce, alongside
from trioserve.errors import (
    ConfigError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotLoadedError,
    ServerClosingError,
    UnknownModelError,
)
from trioserve.models.catalog import Catalog, ModelEntry
from trioserve.router.child import Child, HealthCheck, Report, estimate
from trioserve.router.forward import ChildAnswer, ChildConnection, NotTakenError, Outgoing, connect
from trioserve.router.launch import Launcher, open_launcher, socket_folder
from trioserve.router.schedule import Lease, Schedule
from trioserve.router.states import Events, FleetEvent, ModelState, QueueStatus, Record, Status

__all__ = ["Child", "Fleet"]

_log = structlog.stdlib.get_logger("trioserve.router")

#: Seconds that processes have to end after their requests, when all are drained.
_GRACE = 5.0

#: How far a model is loaded, in the form of llama-server, but for the value.
_PROGRESS: dict[str, Any] = {"stages": ["text_model"], "current": "text_model"}

#: Seconds between two reports to waiting requests of where they stand.
_NEWS_INTERVAL = 0.1


class Fleet(EnteredOnce):
    """The models of a catalog, each in a separate process.

    Inside ``async with Fleet(catalog) as fleet:``, ``async with fleet.use(entry) as child:`` gives
    a process that has the model ready, and keeps it from being stopped for another model. Leaving
    kills the processes that still run; call `drain` before to let their requests finish.

    Args:
        catalog: the models.
        max_models: how many processes may run; 0: any number.
        max_memory: bytes that they may need together, by llama.cpp's estimate; 0: any number.
        drain_timeout: seconds that requests have to finish in `drain`.
        launcher: starts processes; the default forks one with all imports done, if possible.
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
        self._watch = watch or HealthCheck()
        self._schedule = Schedule(max_models=max_models, max_memory=max_memory)
        self._events = Events()
        self._listeners: set[_Bell] = set()  # of requests that report their place in the queue
        self._news = _Bell()
        self._records: dict[str, Record] = {}
        self._open_launcher: Callable[[], AbstractAsyncContextManager[Launcher]] = lambda: (
            nullcontext(launcher) if launcher else open_launcher(catalog.environment)
        )
        # These are there on entry: the folder is that of the sockets.
        self._launcher: Launcher
        self._folder: Path
        self._context: Context
        self._n_children = 0
        self._nursery: trio.Nursery | None = None
        self._running = trio.Event()
        self._closed = True  # until it is entered

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
            self._folder = stack.enter_context(socket_folder())
            self._launcher = await stack.enter_async_context(self._open_launcher())
            for entry in at_once:
                self._record(entry)
                self._schedule.want(entry.name)
            self._context = copy_context()
            self._closed = False
            await stack.enter_async_context(alongside(self._have_processes))
            await stack.enter_async_context(alongside(self._tell_waiting))
            await self._running.wait()
            stack.callback(self._close)
            yield

    async def _tell_waiting(self) -> None:
        """Have those who wait look where they stand, when that may have changed."""
        while True:
            await self._news.wait()
            for bell in list(self._listeners):
                bell.ring()
            await trio.sleep(_NEWS_INTERVAL)

    def _close(self) -> None:
        self._closed = True
        for name in self._records:
            self._schedule.unload(name, ServerClosingError())

    async def drain(self) -> None:
        """Take nothing new, have all processes finish their requests, and wait for their end.

        Processes that run after `drain_timeout` are killed.
        """
        self._close()
        children = [one.child for one in self._records.values() if one.child is not None]
        for child in children:
            child.stop(self._drain_timeout + _GRACE)
        for child in children:
            await child.finished.wait()

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
            child = record.child  # now: it may have died before this task runs again
            bell.ring()

        lease = self._schedule.join(entry.name, changed)
        try:
            if not lease.granted:
                self._turn()
                await self._until_granted(lease, bell, on_wait)
            record.use()
            assert child is not None
            yield child
        finally:
            record.use()
            self._schedule.leave(lease)
            self._turn()

    def _usable(self, entry: ModelEntry, autoload: bool) -> Record:
        """The record of a model that may be used. Raises as `use`."""
        if self._closed:
            raise ServerClosingError
        record = self._record(entry)
        runs = record.child is not None and not record.child.asked
        if not runs and not autoload:
            raise ModelNotLoadedError(f"The model {entry.name!r} is not loaded.", param="model")
        if not runs and record.deaths.wait_s(trio.current_time()):
            raise record.too_often()
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
                    raise lease.error.again()
                if on_wait is not None:
                    on_wait(self._waiting(lease))
                await bell.wait()
        finally:
            self._listeners.discard(bell)

    def _waiting(self, lease: Lease) -> QueueStatus:
        record = self._records[lease.model]
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
        record = self._record(entry)
        if record.child is not None and not record.child.asked:
            raise InvalidRequestError(f"The model {entry.name!r} is running already.")
        record.deaths.forget()
        self._schedule.release(entry.name)
        self._schedule.want(entry.name)
        self._turn()

    async def unload(self, entry: ModelEntry) -> None:
        """Begin to stop a model, which gets its `stop_timeout`. One that still loads is killed.

        Raises:
            InvalidRequestError: it is not running, and no request waits for it.
        """
        record = self._record(entry)
        if record.child is None and not self._schedule.is_queued(entry.name):
            raise InvalidRequestError(f"The model {entry.name!r} is not running.")
        error = ModelLoadError(f"The model {entry.name!r} was unloaded before it was ready.")
        if self._schedule.unload(entry.name, error):
            self._stop(record)
        self._turn()

    async def reload(self) -> None:
        """Read the catalog again, and wait until models that changed or disappeared do not run.

        A model that has changed is started again for those who wait for it.

        Raises:
            ConfigError: as `Catalog.reload`.
        """
        changes = await trio.to_thread.run_sync(self.catalog.reload)
        records, ending = self._records, []
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
                self._stop(record)
            if record.child is not None:
                ending.append(record.child)
        self._turn()
        for child in ending:
            await child.finished.wait()
        self.tell(FleetEvent(model="*", event="models_reload"))

    # -- processes

    async def _have_processes(self) -> None:
        """Start and stop processes until cancelled, which kills them."""
        async with trio.open_nursery() as self._nursery:
            self._running.set()
            self._turn()
            try:
                await trio.sleep_forever()
            finally:
                self._close()

    def _record(self, entry: ModelEntry) -> Record:
        return self._records.setdefault(entry.name, Record(entry))

    def _turn(self) -> None:
        """Carry out the schedule's decisions."""
        if self._nursery is None or self._closed:
            return
        decision = self._schedule.decide()
        for name in decision.stop:
            self._stop(self._records[name])
        for name in decision.start:
            self._start(self._records[name])
        for name in decision.estimate:
            self._begin(self._estimate, self._records[name])
        if self._schedule.has_waiting:
            self._news.ring()

    def _stop(self, record: Record) -> None:
        """Have a process end: when its requests have, or at once if it is not ready."""
        if record.child is not None:
            record.child.stop(record.entry.stop_timeout if record.is_ready else 0.0)

    def _begin(self, function: Callable[..., Awaitable[None]], *args: Any) -> None:
        """Begin a task, which is ours and not that of the request that was the occasion for it."""
        assert self._nursery is not None
        self._context.copy().run(self._nursery.start_soon, function, *args)

    # -- one process

    def _start(self, record: Record) -> None:
        self._n_children += 1
        child = Child(record.entry.name, self._folder / f"{self._n_children}.sock", self._watch)
        record.begin(child)
        self._announce(record)
        self._begin(self._attend, record, child)

    async def _attend(self, record: Record, child: Child) -> None:
        """Run a process from its start to its end."""
        try:
            await child.run(self._launcher, record.known.args, partial(self._told, record))
        except ModelLoadError as error:
            child.message = error.message
        finally:
            self._ended(record, child)
            child.finished.set()

    def _told(self, record: Record, report: Report) -> None:
        """A process has reported its state."""
        name = record.entry.name
        data: dict[str, Any] = {}
        match report.get("state"):
            case "downloading" | "loading" as state:
                record.note(value=Status(state), progress=report.get("progress"))
                data = {"progress": _PROGRESS | {"value": record.known.progress}}
            case "ready":
                record.is_ready = True
                info = report.get("info", record.known.info)
                record.note(value=Status.LOADED, progress=None, info=info)
                data = {"info": report["info"]} if "info" in report else {}
                self._schedule.ready(name)
            case "sleeping":
                record.note(value=Status.SLEEPING)
                self._schedule.asleep(name)
            case "ended":
                self._schedule.dying(name)  # the rest when all that it wrote has been read
                return
            case _:
                return  # it has failed, and will end
        self._announce(record, data)
        self._turn()

    def _ended(self, record: Record, child: Child) -> None:
        """A process has ended: notify its requests, and decide whether to start another one."""
        name, was_ready = record.entry.name, record.is_ready
        record.end(child)
        self._schedule.gone(name, ModelLoadError(child.last_words()))
        self._announce(record, {"exit_code": child.exit_code})
        if record.known.failed and not self._closed:
            _log.error("the process of a model has ended", model=name, reason=record.known.message,
                       exit_code=child.exit_code)  # fmt: skip
            self._recover(record, was_ready)
        self._turn()

    def _recover(self, record: Record, was_ready: bool) -> None:
        """Start a process again that has died, unless that happens too often."""
        name = record.entry.name
        delay = record.deaths.note(trio.current_time())
        if delay is None:
            self._schedule.refuse(name, record.too_often())
        elif was_ready:
            self._schedule.hold(name)
            self._schedule.want(name)
            self._begin(self._release, name, delay)

    async def _release(self, name: str, delay: float) -> None:
        await trio.sleep(delay)
        self._schedule.release(name)
        self._turn()

    async def _estimate(self, record: Record) -> None:
        """Estimate the memory that a model needs."""
        entry = record.entry
        try:
            need = await estimate(self._launcher, entry.name, entry.args)
        except ModelLoadError as error:
            self._schedule.not_estimated(entry.name, error)
        else:
            self._schedule.estimated(entry.name, need)
        self._turn()

    def _announce(self, record: Record, data: Mapping[str, Any] | None = None) -> None:
        about = {"status": record.known.value.value, **(data or {})}
        self.tell(FleetEvent(model=record.entry.name, event="status_change", data=about))

    # -- what is to be seen

    def state(self, name: str) -> ModelState:
        """A model as it is now."""
        record = self._records.get(name)
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
