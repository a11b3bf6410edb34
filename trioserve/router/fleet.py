"""`Fleet`: the processes of many models, each started when a request needs it."""

from __future__ import annotations

import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    nullcontext,
)
from functools import partial
from typing import Any

import attrs
import trio

from trioserve.children.child import Child
from trioserve.children.launch import Launcher, open_launcher
from trioserve.children.reports import MODEL, Downloading, Loading, Ready, Report, Sleeping, Usage
from trioserve.concurrency import (
    Bell,
    EnteredOnce,
    Failed,
    Gate,
    Jobs,
    Phase,
    alongside,
    repeat,
)
from trioserve.errors import (
    ConfigError,
    InvalidRequestError,
    ModelLoadError,
    ModelNotLoadedError,
    ServerClosingError,
    TrioServeError,
    UnknownModelError,
)
from trioserve.llama.machine import MemoryUse, memory_use
from trioserve.log import get_logger
from trioserve.model_process.connection import Known
from trioserve.models.catalog import Catalog, ModelEntry
from trioserve.router.child import HealthCheck, ModelChild, estimate
from trioserve.router.schedule import Lease, Schedule
from trioserve.router.states import Deaths, Events, FleetEvent, ModelState, QueueStatus, Status

_log = get_logger("trioserve.router")

#: The progress of a model that loads, in the form of llama-server, without the value.
_PROGRESS: dict[str, Any] = {"stages": ["text_model"], "current": "text_model"}

#: Seconds between two measurements of the memory.
_MEMORY_INTERVAL = 2.0

#: Seconds between two reports to waiting requests of where they stand.
_NEWS_INTERVAL = 0.1


@attrs.define(eq=False)
class _Model:
    """A model, its process or the last one that it had, and how often these have died."""

    entry: ModelEntry
    child: ModelChild | None = None
    deaths: Deaths = attrs.field(factory=Deaths)


@attrs.frozen
class Needs:
    """Bytes that a model would need, and the RAM that is free for it; None: not known."""

    memory: int
    free: int | None


class Fleet(EnteredOnce):
    """The models of a catalog, each in a separate process.

    Inside ``async with Fleet(catalog) as fleet:``, ``async with fleet.use(entry) as child:`` gives
    a process that has the model ready, and keeps it from being stopped for another model. Leaving
    kills the processes that still run; call `drain` before to let their requests finish.

    Args:
        catalog: the models.
        max_models: how many processes may run; 0: any number.
        max_memory: bytes that they may need together, by llama.cpp's estimate; 0: any number.
            Negative: what is free, as measured.
        drain_timeout: seconds that requests have to finish in `drain`.
        launcher: starts processes; the default spawns them, or forks them from `zygote`.
        zygote: see `trioserve.children.launch.open_launcher`.
        watch: how processes are watched.
        measure: measures the memory of processes, by their ids, and what is free.

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
        zygote: Child | None = None,
        watch: HealthCheck | None = None,
        measure: Callable[[Sequence[int]], Awaitable[MemoryUse]] | None = None,
    ) -> None:
        self.catalog = catalog
        self.max_models = max_models
        self._drain_timeout = drain_timeout
        self._watch = watch or HealthCheck()
        self._measure = measure or _measure
        self._schedule = Schedule(max_models=max_models, max_memory=max_memory, place=self._place)
        #: The events of all models.
        self.events = Events()
        self._listeners: set[Bell] = set()  # of requests that report their place in the queue
        self._news = Bell()
        self._models: dict[str, _Model] = {}
        self.on_usage: Callable[[str, Any], None] = lambda *_: None  # what keys use of a model
        self._gate = Gate()
        self._jobs = Jobs(self._gate)
        self._open_launcher: Callable[[], AbstractAsyncContextManager[Launcher]] = lambda: (
            nullcontext(launcher) if launcher else open_launcher(catalog.environment, zygote)
        )
        self._launcher: Launcher  # from the entry on

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
            self._launcher = await stack.enter_async_context(self._open_launcher())
            jobs = [self._jobs.run, self._tell_waiting]
            if self._schedule.is_measured:
                jobs.append(partial(repeat, self._watch_memory))
            await stack.enter_async_context(alongside(*jobs))
            stack.callback(self._close)
            for entry in at_once:
                self._model(entry)
                self._schedule.want(entry.name)
            self._turn()
            yield

    async def _tell_waiting(self) -> None:
        """Have those who wait look where they stand, when that may have changed."""
        try:
            await repeat(self._tell_those_who_wait)
        finally:
            self._close()  # before processes that are killed could be started again

    async def _tell_those_who_wait(self) -> None:
        await self._news.wait()
        for bell in self._listeners:
            bell.ring()
        await trio.sleep(_NEWS_INTERVAL)

    @property
    def _is_open(self) -> bool:
        return self._gate.phase.value is Phase.OPEN

    def _close(self) -> None:
        self._gate.refuse()
        for name in self._models:
            self._schedule.unload(name, ServerClosingError())

    async def drain(self) -> None:
        """Take nothing new, have all processes finish their requests, and wait for their end.

        Requests that run after `drain_timeout` end with an error.
        """
        self._close()
        children = [one.child for one in self._models.values() if one.child is not None]
        running = [child for child in children if not child.finished.is_set()]
        for child in running:
            child.stop(self._drain_timeout)
        for child in running:
            await child.finished.wait()

    # -- what requests do

    @asynccontextmanager
    async def use(
        self,
        entry: ModelEntry,
        *,
        autoload: bool = True,
        on_wait: Callable[[QueueStatus], None] | None = None,
    ) -> AsyncIterator[ModelChild]:
        """Wait until a model is ready, and keep it for the length of the block.

        Args:
            autoload: whether it may be started for this.
            on_wait: called with where the request stands, at first and when that changes.

        Raises:
            ModelNotLoadedError: it is not loaded, and may not be.
            ModelLoadError: it cannot be loaded.
            ModelFailedError: its processes have died too often.
            ServerClosingError: the fleet is closing.
        """
        self._check(entry, autoload)
        bell = Bell()
        lease = self._schedule.join(entry.name, bell.ring)
        try:
            if not lease.granted:
                self._turn()
                await self._until_granted(lease, bell, on_wait)
            child = lease.process
            assert isinstance(child, ModelChild)
            child.used_at = time.time()
            yield child
        finally:
            used = lease.process
            self._schedule.leave(lease)
            if isinstance(used, ModelChild):
                used.note_use()
            self._turn()

    def _check(self, entry: ModelEntry, autoload: bool) -> None:
        """Check that a model may be used. Raises as `use`."""
        self._gate.check()
        model = self._model(entry)
        if self._schedule.may_serve(entry.name):
            return
        if not autoload:
            raise ModelNotLoadedError(f"The model {entry.name!r} is not loaded.", param="model")
        if (error := model.deaths.error(entry.name, trio.current_time())) is not None:
            raise error

    def is_ready(self, entry: ModelEntry) -> bool:
        """True if a request that comes now would not have to wait for the model."""
        return self._is_open and self._schedule.is_free(entry.name)

    async def _until_granted(
        self, lease: Lease, bell: Bell, on_wait: Callable[[QueueStatus], None] | None
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
        position = self._schedule.position(lease)
        child = self._models[lease.model].child
        if child is None or not self._schedule.is_loading(lease.model):
            return QueueStatus(position=position, status=Status.UNLOADED)
        return QueueStatus(position=position, status=child.status, progress=child.progress)

    # -- what others ask for

    async def load(self, entry: ModelEntry, args: tuple[str, ...] = ()) -> None:
        """Begin to load a model. One that has failed gets another chance.

        Args:
            args: other flags for it, which it keeps until the fleet ends; none: those that it has.

        Raises:
            InvalidRequestError: it is loaded already, or will be.
            ServerClosingError: the fleet is closing.
        """
        self._gate.check()
        if self._schedule.may_serve(entry.name):
            raise InvalidRequestError(f"The model {entry.name!r} is running already.")
        if args:
            self.catalog.set(entry.name, args)
            self._model(entry).entry = self.catalog.entries[entry.name]
            self._schedule.forget(entry.name)
        self._model(entry).deaths.forget()
        self._schedule.release(entry.name)
        self._schedule.want(entry.name)
        self._turn()

    async def needs(self, entry: ModelEntry) -> Needs:
        """Estimate the memory that a model would take; it need not be in the catalog.

        Raises:
            ModelLoadError: the model cannot be used.
        """
        found = await estimate(self._launcher, entry)
        return Needs(memory=found.need, free=await self.room())

    async def unload(self, entry: ModelEntry) -> None:
        """Begin to stop a model, which gets its `stop_timeout`. One that still loads is killed.

        Raises:
            InvalidRequestError: it is not running, and no request waits for it.
        """
        name = entry.name
        if not (self._schedule.has_place(name) or self._schedule.is_queued(name)):
            raise InvalidRequestError(f"The model {name!r} is not running.")
        error = ModelLoadError(f"The model {name!r} was unloaded before it was ready.")
        if self._schedule.unload(name, error):
            self._stop(self._models[name])
        self._turn()

    async def reload(self) -> None:
        """Read the catalog again, and wait until models that changed or disappeared do not run.

        A model that has changed is started again for those who wait for it.

        Raises:
            ConfigError: as `Catalog.reload`.
        """
        changes = await trio.to_thread.run_sync(self.catalog.reload)
        ending = []
        for name, model in list(self._models.items()):
            model.entry = self.catalog.entries.get(name, model.entry)
            if name in changes.removed:
                gone = UnknownModelError(f"The model {name!r} is no longer there.", param="model")
                must_stop = self._schedule.unload(name, gone)
            elif name in changes.changed:
                model.deaths.forget()
                must_stop = self._schedule.stop(name)
            else:
                continue
            self._schedule.forget(name)
            if must_stop:
                self._stop(model)
            if model.child is not None and self._schedule.has_place(name):
                ending.append(model.child)
            if name in changes.removed:
                del self._models[name]
        self._turn()
        for child in ending:
            await child.finished.wait()
        self.events.tell(FleetEvent(model="*", event="models_reload"))

    def begin(
        self, job: Callable[[], Awaitable[None]], failed: Failed = lambda error: None
    ) -> None:
        """Begin a job of the router, which ends with the fleet; see `Jobs.begin`.

        Raises:
            ServerClosingError: the fleet is closing.
        """
        self._jobs.begin(job, failed)

    # -- processes

    def _model(self, entry: ModelEntry) -> _Model:
        return self._models.setdefault(entry.name, _Model(entry))

    def _turn(self) -> None:
        """Carry out the schedule's decisions."""
        if not self._is_open:
            return
        decision = self._schedule.decide()
        for name in decision.stop:
            self._stop(self._models[name])
        for name in decision.start:
            model = self._models[name]
            assert model.child is not None  # `_place` has made it
            self._announce(model.child)
            self.begin(partial(self._attend, model, model.child))
        for name in decision.estimate:
            model = self._models[name]
            self.begin(partial(self._estimate, model), partial(self._not_estimated, model))
        if self._schedule.has_waiting:
            self._news.ring()

    def _place(self, name: str, need: int) -> ModelChild:
        """Make the process of a model, which `_turn` then starts."""
        model = self._models[name]
        model.child = ModelChild(
            name, need, entry=model.entry, watch=self._watch, environ=self.catalog.environment
        )
        return model.child

    def _stop(self, model: _Model) -> None:
        """Have a process end: when its requests have, or at once if it is not ready."""
        if model.child is not None:
            model.child.stop(model.entry.stop_timeout if model.child.was_ready else 0.0)

    # -- one process

    async def _attend(self, model: _Model, child: ModelChild) -> None:
        """Run a process from its start to its end."""
        try:
            await child.run(
                self._launcher, [MODEL, *child.entry.args], partial(self._on_report, child)
            )
        except ModelLoadError as error:
            child.message = error.message
        finally:
            self._ended(model, child)

    def _on_report(self, child: ModelChild, report: Report | None) -> None:
        """A process has reported its state, or ended."""
        data: dict[str, Any] = {}
        match report:
            case Downloading(progress) | Loading(progress):
                child.status, child.progress = Status(report.state), progress
                data = {"progress": _PROGRESS | {"value": progress}}
            case Ready():
                child.progress = None
                self._schedule.ready(child.name)
            case Sleeping():
                self._schedule.asleep(child.name)
            case Usage(rows):
                self.on_usage(child.name, rows)
                return
            case None:
                self._schedule.dying(child.name)  # the rest when all that it wrote has been read
                return
            case _:
                return  # it has failed, and will end
        self._announce(child, data)
        self._turn()

    def _ended(self, model: _Model, child: ModelChild) -> None:
        """A process has ended: notify its requests, and decide whether to start another one."""
        reason = child.last_words()
        self._schedule.gone(child.name, ModelLoadError(reason))
        child.finished.set()
        self._announce(child, {"exit_code": child.exit_code})
        if child.failed and self._is_open:
            _log.error("the process of a model has ended", model=child.name, reason=reason,
                       exit_code=child.exit_code)  # fmt: skip
            if self._models.get(child.name) is model:  # it was not removed meanwhile
                self._recover(model, reason, was_ready=child.was_ready)
        self._turn()

    def _recover(self, model: _Model, reason: str, *, was_ready: bool) -> None:
        """Start a process again that has died, unless that happens too often."""
        name, now = model.entry.name, trio.current_time()
        delay = model.deaths.note(now, reason)
        if (error := model.deaths.error(name, now)) is not None:
            self._schedule.refuse(name, error)
        elif was_ready and delay is not None:
            self._schedule.hold(name)
            self._schedule.want(name)
            self.begin(partial(self._release, name, delay))

    async def _release(self, name: str, delay: float) -> None:
        await trio.sleep(delay)
        self._schedule.release(name)
        self._turn()

    async def _estimate(self, model: _Model) -> None:
        """Estimate the memory that a model needs."""
        others = None
        if self._schedule.is_measured:
            others = await self._measure_children()
        found = await estimate(self._launcher, model.entry, others)
        self._schedule.estimated(model.entry.name, found.need, found.gpus)
        if others is not None:
            running = [child.gpus for child in self._children()]
            sums = (
                free + sum(size for gpus in running for size in gpus[i : i + 1])
                for i, free in enumerate(found.free_gpus)
            )
            self._schedule.limit(self._schedule.max_memory, tuple(sums))
        self._turn()

    def _children(self) -> list[ModelChild]:
        """The processes that run."""
        found = [model.child for model in self._models.values() if model.child is not None]
        return [child for child in found if child.pid is not None]

    async def _watch_memory(self) -> None:
        """Measure; a model that waits starts once there is room for it."""
        await trio.sleep(_MEMORY_INTERVAL)
        await self._measure_children()
        self._turn()

    async def _measure_children(self) -> int:
        """Measure what the processes have, and what all of them may have; returns the former."""
        children = self._children()
        pids = [child.pid for child in children if child.pid is not None]
        found = await self._measure(pids)
        total = 0
        for child, pid in zip(children, pids, strict=True):
            if pid in found.processes:  # others have ended
                child.memory_used, kept = found.processes[pid]
                self._schedule.measured(child.name, kept)
                total += kept
        if found.free is not None:
            self._schedule.limit(found.free + total)
        return total

    async def room(self) -> int | None:
        """The bytes of RAM that models may take, without those that others keep; None: unknown."""
        children = self._children()
        found = await self._measure([child.pid for child in children if child.pid is not None])
        used = sum(kept for _, kept in found.processes.values())
        most = 0 if self._schedule.is_measured else self._schedule.max_memory
        return max(0, most - used) if most else found.free

    def _not_estimated(self, model: _Model, error: TrioServeError) -> None:
        """Refuse those who wait, and others for a while if the estimate fails too often."""
        name, now = model.entry.name, trio.current_time()
        model.deaths.note(now, error.message)
        self._schedule.not_estimated(name, model.deaths.error(name, now) or error)
        self._turn()

    def _announce(self, child: ModelChild, data: Mapping[str, Any] | None = None) -> None:
        about = {"status": child.status.value, **(data or {})}
        self.events.tell(FleetEvent(model=child.name, event="status_change", data=about))

    # -- what is to be seen

    def state(self, name: str) -> ModelState:
        """A model as it is now."""
        model = self._models.get(name)
        child = None if model is None else model.child
        return attrs.evolve(
            ModelState() if child is None else child.state(),
            n_requests=self._schedule.n_users(name),
            n_waiting=self._schedule.n_waiting(name),
            memory=self._schedule.need_of(name),
        )

    def known(self, name: str) -> Known:
        """The known properties of a model, by the last process that it had."""
        return Known() if (child := self.child(name)) is None else child.line.known

    def child(self, name: str) -> ModelChild | None:
        """The process of a model, or the last one that it had; None: it never had one."""
        return None if (model := self._models.get(name)) is None else model.child

    def loaded(self) -> dict[str, ModelChild]:
        """The processes whose models are loaded, though they may sleep, by name."""
        return {child.name: child for child in self._children() if child.was_ready}


async def _measure(pids: Sequence[int]) -> MemoryUse:
    return await trio.to_thread.run_sync(memory_use, pids, abandon_on_cancel=True)
