"""The processes of models: started, stopped and restarted as a schedule demands.

`Record` is what is known of one model, and `Deaths` how often its processes died lately.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import structlog
import trio

from trioserve.errors import ModelFailedError, ModelLoadError, TrioServeError
from trioserve.models.catalog import ModelEntry
from trioserve.router.child import Child, HealthCheck, Report, estimate
from trioserve.router.launch import Launcher
from trioserve.router.schedule import Schedule
from trioserve.router.states import FleetEvent, ModelState, Status

_log = structlog.stdlib.get_logger("trioserve.router")

#: This many deaths within these seconds are too many; for as long, it is not started again.
MAX_DEATHS = 3
WINDOW = 60.0

#: Seconds before the next start, after the first death within the window and the second.
_DELAYS = (0.25, 1.0)


class Deaths:
    """The recent deaths of one model's processes. Times are those of any clock, in seconds."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._failed_until = 0.0

    def note(self, now: float) -> float | None:
        """Count a death. Returns the seconds until the next start; None: there were too many."""
        self._times = [*(time for time in self._times if time > now - WINDOW), now]
        if len(self._times) < MAX_DEATHS:
            return _DELAYS[len(self._times) - 1]
        self._failed_until = now + WINDOW
        return None

    def wait_s(self, now: float) -> float:
        """Seconds until it may be started, when there were too many deaths; otherwise 0."""
        return max(0.0, self._failed_until - now)

    def forget(self) -> None:
        """Begin anew, because a person asked for it or the model has changed."""
        self._times.clear()
        self._failed_until = 0.0


@attrs.define(eq=False)
class Record:
    """A model, its process if it has one, and what became of the last one."""

    entry: ModelEntry
    child: Child | None = None
    is_ready: bool = False  # its process was ready once, though it may sleep
    known: ModelState = attrs.field(factory=ModelState)  # but for what changes with each request
    last_used: float | None = None
    deaths: Deaths = attrs.field(factory=Deaths)

    def note(self, **changes: Any) -> None:
        """Change what is known."""
        self.known = attrs.evolve(self.known, **changes)

    def begin(self, child: Child) -> None:
        """A process is being started."""
        self.child, self.is_ready = child, False
        args = (*self.entry.args, "--host", str(child.socket_path))
        self.known = ModelState(value=Status.LOADING, args=args, socket_path=child.socket_path)
        self.use()

    def end(self, child: Child) -> None:
        """Its process has ended."""
        self.child, self.is_ready = None, False
        self.note(
            value=Status.UNLOADED,
            socket_path=None,
            progress=None,
            exit_code=child.exit_code,
            failed=not child.asked,
        )
        if self.known.failed:
            self.note(message=child.last_words(), log_tail=tuple(child.lines))

    def use(self) -> None:
        """Note that it is in use now."""
        self.last_used = time.time()


class FleetSupervisor:
    """Does what a schedule decides. Call `turn` whenever something has changed there.

    Args:
        schedule: decides.
        launcher: starts processes.
        watch: how they are watched.
        folder: where their sockets are.
        tell: hears of what happens.
        changed: called when those who wait may stand elsewhere.
    """

    def __init__(
        self,
        schedule: Schedule,
        launcher: Launcher,
        watch: HealthCheck,
        *,
        folder: Path,
        tell: Callable[[FleetEvent], None],
        changed: Callable[[], None],
    ) -> None:
        self.records: dict[str, Record] = {}
        self._schedule = schedule
        self._launcher = launcher
        self._watch = watch
        self._folder = folder
        self._tell = tell
        self._changed = changed
        self.running = trio.Event()
        self._n_children = 0
        self._nursery: trio.Nursery | None = None
        self._context = copy_context()
        self._closed = False

    async def run(self) -> None:
        """Have processes until cancelled, which kills them. Sets `running` at first."""
        async with trio.open_nursery() as self._nursery:
            self.running.set()
            self.turn()
            await trio.sleep_forever()

    def close(self, error: TrioServeError) -> None:
        """Start nothing any more, and refuse all who wait."""
        self._closed = True
        for name in self.records:
            self._schedule.unload(name, error)

    def record(self, entry: ModelEntry) -> Record:
        """What is known of a model."""
        return self.records.setdefault(entry.name, Record(entry))

    def turn(self) -> None:
        """Do what is to be done now."""
        if self._nursery is None or self._closed:
            return
        decision = self._schedule.decide()
        for name in decision.stop:
            self.stop(self.records[name])
        for name in decision.start:
            self._start(self.records[name])
        for name in decision.estimate:
            self._begin(self._estimate, self.records[name])
        if self._schedule.has_waiting:
            self._changed()

    def stop(self, record: Record) -> None:
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
        """Have a process from its start to its end."""
        try:
            await child.run(self._launcher, record.known.args, partial(self._told, record))
        except ModelLoadError as error:
            child.message = error.message
        finally:
            self._ended(record, child)
            child.finished.set()

    def _told(self, record: Record, report: Report) -> None:
        """A process has told its state."""
        name = record.entry.name
        data: dict[str, Any] = {}
        match report.get("state"):
            case "downloading" | "loading" as state:
                record.note(value=Status(state), progress=report.get("progress"))
                data = {"progress": _progress(record)}
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
        self.turn()

    def _ended(self, record: Record, child: Child) -> None:
        """A process has ended: see who has to know, and whether there is to be another one."""
        name, was_ready = record.entry.name, record.is_ready
        record.end(child)
        self._schedule.gone(name, ModelLoadError(child.last_words()))
        self._announce(record, {"exit_code": child.exit_code})
        if record.known.failed and not self._closed:
            _log.error("the process of a model has ended", model=name, reason=record.known.message,
                       exit_code=child.exit_code)  # fmt: skip
            self._recover(record, was_ready)
        self.turn()

    def _recover(self, record: Record, was_ready: bool) -> None:
        """Start a process again that has died, unless that happens too often."""
        name = record.entry.name
        delay = record.deaths.note(trio.current_time())
        if delay is None:
            self._schedule.refuse(name, too_often(record))
        elif was_ready:
            self._schedule.hold(name)
            self._schedule.want(name)
            self._begin(self._release, name, delay)

    async def _release(self, name: str, delay: float) -> None:
        await trio.sleep(delay)
        self._schedule.release(name)
        self.turn()

    async def _estimate(self, record: Record) -> None:
        """Find out what memory a model needs."""
        entry = record.entry
        try:
            need = await estimate(self._launcher, entry.name, entry.args)
        except ModelLoadError as error:
            self._schedule.not_estimated(entry.name, error)
        else:
            self._schedule.estimated(entry.name, need)
        self.turn()

    def _announce(self, record: Record, data: Mapping[str, Any] | None = None) -> None:
        about = {"status": record.known.value.value, **(data or {})}
        self._tell(FleetEvent(model=record.entry.name, event="status_change", data=about))


def too_often(record: Record) -> ModelFailedError:
    """The error of a model whose processes have died too often."""
    wait_s = record.deaths.wait_s(trio.current_time())
    return ModelFailedError(
        f"The model {record.entry.name!r} has failed {MAX_DEATHS} times within a minute, so it is "
        f"not started again for another {wait_s:.0f} seconds. {record.known.message}",
        retry_after=wait_s,
    )


def _progress(record: Record) -> dict[str, Any]:
    """How far a model is loaded, in the form of llama-server."""
    return {"stages": ["text_model"], "current": "text_model", "value": record.known.progress}
