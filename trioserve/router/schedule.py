"""The schedule of models and of requests that wait, without a clock, a process or a task.

Callers report events (a request came or left, a model is ready, a process ended), and `decide`
returns what to do. Its rules:

- There are at most as many running models as places, and they fit into the memory. Where that is
  measured, a model counts with what it has taken, or is still going to take if that is more.
- To make room, it stops the least recently used model that no request uses.
- Models are started in the order in which they were first requested. All requests for a model wait
  for the same start.
- A request for a model that runs does not wait. But a queue could wait forever for the place of a
  model that is never idle; so after some such requests, later ones join the end of the queue,
  until the first request in it has its place.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import Enum

import attrs

from trioserve.errors import ModelLoadError, TrioServeError
from trioserve.router.states import Status

#: Requests that models which run may take while the first in the queue waits for a place.
PATIENCE = 32


class Phase(Enum):
    """The phases of a process: it loads, is ready, and leaves in one of three ways."""

    LOADING = 1
    READY = 2
    STOPPING = 3  # finishes its requests
    ABORTED = 4  # was stopped before it was ready
    DIED = 5  # ended by itself after it was ready


@attrs.define(eq=False)
class Instance:
    """A model's process, from before its start until it has ended: what decides about its place."""

    name: str
    need: int  # bytes
    gpus: tuple[int, ...] = ()  # bytes on each device, if they are counted
    phase: Phase = Phase.LOADING
    status: Status = Status.LOADING  # what it last reported
    closing: bool = False  # accepts no more requests, because the queue has waited for long
    n_users: int = 0
    last_use: int = 0

    @property
    def is_leaving(self) -> bool:
        """True if it takes no more requests, and its place becomes free."""
        return self.phase not in (Phase.LOADING, Phase.READY)

    @property
    def was_ready(self) -> bool:
        """True if its model was loaded once, though it may sleep or be leaving."""
        return self.phase not in (Phase.LOADING, Phase.ABORTED)

    @property
    def was_stopped(self) -> bool:
        """True if its end was decided here."""
        return self.phase in (Phase.STOPPING, Phase.ABORTED)


@attrs.define(eq=False)
class Lease:
    """A request's place in line for a model; once `granted`, its right to use it.

    `changed` is called when it is granted or refused. When refused, `error` says why. `process` is
    the one that it is granted, also when that dies at once.
    """

    model: str
    changed: Callable[[], None]
    error: TrioServeError | None = None
    process: Instance | None = None

    @property
    def granted(self) -> bool:
        """True if the model is ready for the request."""
        return self.process is not None


@attrs.define(eq=False)
class PendingLoad:
    """An entry of the queue: a model to start."""

    name: str
    need: int | None  # bytes; None: not known yet
    gpus: tuple[int, ...] = ()
    wanted: bool = False  # even if no request waits
    n_overtaken: int = 0


@attrs.frozen
class Plan:
    """Decisions: which processes to start and stop, and which models to estimate."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    estimate: tuple[str, ...] = ()


class Schedule:
    """Decides which models run.

    Args:
        max_models: how many may run at the same time; 0: any number.
        max_memory: bytes that they may need together; 0: any number. Negative: what `limit` says,
            and what a model needs is estimated again before each start.
        place: makes the record of a process from the name of its model and the bytes it needs.
    """

    def __init__(
        self,
        *,
        max_models: int = 0,
        max_memory: int = 0,
        place: Callable[[str, int], Instance] = Instance,
    ) -> None:
        self.max_models = max_models
        self.is_measured = max_memory < 0
        self.max_memory = max_memory
        self._max_gpus: tuple[int, ...] = ()
        self._place = place
        self._runs: dict[str, Instance] = {}
        self._queue: list[PendingLoad] = []
        self._lines: defaultdict[str, list[Lease]] = defaultdict(list)  # of requests, by model
        self._needs: dict[str, int] = {}
        self._of_gpus: dict[str, tuple[int, ...]] = {}
        self._asked: set[str] = set()  # whose need is being estimated
        self._held: set[str] = set()
        self._n_uses = 0  # numbers the uses, so that the least recent one can be found

    # -- what requests do

    def join(self, name: str, changed: Callable[[], None]) -> Lease:
        """A request asks for a model. It must `leave`, whatever becomes of it."""
        lease = Lease(name, changed)
        if self.is_free(name):
            self._grant(self._runs[name], lease)
            if (first := self._first()) is not None:
                first.n_overtaken += 1
            return lease
        self._lines[name].append(lease)
        if not self.is_loading(name):
            self._pend(name)
        return lease

    def is_free(self, name: str) -> bool:
        """True if a request that joins would be granted its model at once."""
        run = self._runs.get(name)
        return run is not None and run.phase is Phase.READY and not run.closing

    def leave(self, lease: Lease) -> None:
        """The request has ended, or does not wait any longer."""
        if lease.process is not None:
            lease.process.n_users -= 1
            self._use(lease.process)
            lease.process = None
            return
        line, pending = self._lines[lease.model], self._find(lease.model)
        if lease in line:
            line.remove(lease)
        if pending is not None and not line and not pending.wanted:
            self._queue.remove(pending)

    def position(self, lease: Lease) -> int:
        """The number of waiting requests before this one."""
        queue = [pending.name for pending in self._queue]
        names = [lease.model] if self.is_loading(lease.model) else queue
        line = [one for name in names for one in self._lines[name]]
        return line.index(lease) if lease in line else 0

    # -- what others ask for

    def want(self, name: str) -> None:
        """Start a model as soon as there is a place, even if no request waits for it."""
        if name not in self._runs or self._runs[name].is_leaving:
            self._pend(name).wanted = True

    def unload(self, name: str, error: TrioServeError) -> bool:
        """Take a model's place away. Requests that use it may end; those that wait are refused.

        Returns whether its process is now to be stopped.
        """
        self.refuse(name, error)
        return self.stop(name)

    def stop(self, name: str) -> bool:
        """Like `unload`, but requests that wait stay in line for the next start."""
        run = self._runs.get(name)
        if run is None or run.is_leaving:
            return False
        run.phase = Phase.STOPPING if run.phase is Phase.READY else Phase.ABORTED
        if self._lines[name]:
            self._pend(name)
        return True

    def refuse(self, name: str, error: TrioServeError) -> None:
        """Take a model out of the queue, and refuse those that wait for it."""
        for lease in self._take_line(name):
            lease.error = error
            lease.changed()

    def hold(self, name: str) -> None:
        """Do not start a model before `release`; others may overtake it."""
        self._held.add(name)

    def release(self, name: str) -> None:
        """Undo `hold`."""
        self._held.discard(name)

    # -- what processes do

    def ready(self, name: str) -> None:
        """The model of a process is loaded: those that wait may use it."""
        run = self._runs[name]
        run.status = Status.LOADED
        if run.phase is not Phase.LOADING:
            return  # it woke up, or is being stopped
        run.phase = Phase.READY
        self._use(run)
        for lease in self._take_line(name):
            self._grant(run, lease)

    def asleep(self, name: str) -> None:
        """A model has freed its memory until the next request. It is the first to be stopped."""
        self._runs[name].status = Status.SLEEPING

    def dying(self, name: str) -> None:
        """A process has died, though it is not `gone` yet: it accepts no more requests."""
        if self._runs[name].phase is Phase.READY:
            self._runs[name].phase = Phase.DIED

    def gone(self, name: str, error: TrioServeError) -> None:
        """A process has ended. Those that waited for it to load are refused."""
        run = self._runs.pop(name)
        run.status = Status.UNLOADED
        if run.phase is Phase.LOADING:
            self.refuse(name, error)

    def estimated(self, name: str, need: int, gpus: tuple[int, ...] = ()) -> None:
        """The memory that a model needs is known."""
        self._needs[name], self._of_gpus[name] = need, gpus
        self._asked.discard(name)
        if (pending := self._find(name)) is not None:
            pending.need, pending.gpus = need, gpus

    def not_estimated(self, name: str, error: TrioServeError) -> None:
        """The memory of a model cannot be estimated: refuse the requests that wait for it."""
        self._asked.discard(name)
        self.refuse(name, error)

    def limit(self, ram: int, gpus: tuple[int, ...] | None = None) -> None:
        """Set the memory that all models together may need, as measured: in RAM and on devices."""
        self.max_memory = max(1, ram)
        if gpus is not None:
            self._max_gpus = gpus

    def measured(self, name: str, used: int) -> None:
        """Record the memory of a process, which may exceed its estimate."""
        run = self._runs.get(name)
        if run is not None:
            run.need = max(self._needs.get(name, 0), used)

    def forget(self, name: str) -> None:
        """A model has changed: estimate its memory again."""
        self._needs.pop(name, None)

    # -- what is to be seen

    def need_of(self, name: str) -> int | None:
        """The bytes that a model needs, if they are known."""
        return self._needs.get(name)

    def n_users(self, name: str) -> int:
        """The number of requests that use a model."""
        run = self._runs.get(name)
        return run.n_users if run is not None else 0

    def is_loading(self, name: str) -> bool:
        """True if a model has a place and is not ready."""
        run = self._runs.get(name)
        return run is not None and run.phase is Phase.LOADING

    def has_place(self, name: str) -> bool:
        """True if a model has a process, which may be leaving."""
        return name in self._runs

    def may_serve(self, name: str) -> bool:
        """True if a model has a place that is not to be given up."""
        run = self._runs.get(name)
        return run is not None and not run.was_stopped

    def is_queued(self, name: str) -> bool:
        """True if a model waits for a place."""
        return self._find(name) is not None

    @property
    def has_waiting(self) -> bool:
        """True if any request waits."""
        return any(self._lines.values())

    def waiting(self) -> list[Lease]:
        """The requests that wait."""
        return [lease for line in self._lines.values() for lease in line]

    def n_waiting(self, name: str) -> int:
        """The number of requests that wait for a model."""
        return len(self._lines[name])

    def decide(self) -> Plan:
        """Return what to do, and count it as begun: models are marked as loading or stopping."""
        start: list[str] = []
        stop: list[str] = []
        for pending in [one for one in self._queue if one.need and not self._fits([one])]:
            self.refuse(pending.name, _too_large(pending, self.max_memory, self.is_measured))
        planned: list[PendingLoad] = []  # loads that get the room being freed
        short: PendingLoad | None = None  # the first that needs more than can be freed now
        for pending in self._unheld():
            run = self._runs.get(pending.name)
            if pending.need is None or (run is not None and not run.is_leaving):
                break
            victims = self._victims(pending, planned, self._idle())
            if victims is None:
                short = pending
                break
            for victim in victims:
                victim.phase = Phase.STOPPING
                stop.append(victim.name)
            if planned or run is not None or not self._has_room(self._runs.values(), pending):
                planned.append(pending)
            else:
                self._queue.remove(pending)
                run = self._runs[pending.name] = self._place(pending.name, pending.need or 0)
                run.last_use, run.gpus = self._n_uses, pending.gpus
                start.append(pending.name)
        self._close_for(short)
        return Plan(tuple(start), tuple(stop), tuple(self._to_estimate()))

    def _victims(
        self, pending: PendingLoad, planned: list[PendingLoad], candidates: Iterable[Instance]
    ) -> list[Instance] | None:
        """The first of the candidates whose places are enough for a load; None: all are not."""
        staying: list[Instance | PendingLoad] = [*planned]
        staying += [run for run in self._runs.values() if not run.is_leaving]
        chosen: list[Instance] = []
        for run in candidates:
            if self._has_room(staying, pending):
                break
            staying.remove(run)
            chosen.append(run)
        if not self._has_room(staying, pending):
            return None
        for run in reversed(chosen[:-1]):  # some that are small may stay, for one that is large
            if self._has_room([*staying, run], pending):
                staying.append(run)
                chosen.remove(run)
        return chosen

    def _has_room(self, others: Iterable[Instance | PendingLoad], pending: PendingLoad) -> bool:
        """True if a load fits beside others."""
        together = [*others, pending]
        too_many = 0 < self.max_models < len(together)
        return not too_many and self._fits(together)

    def _fits(self, together: Sequence[Instance | PendingLoad]) -> bool:
        if 0 < self.max_memory < sum(one.need or 0 for one in together):
            return False
        return all(
            sum(size for one in together for size in one.gpus[i : i + 1]) <= most
            for i, most in enumerate(self._max_gpus)
        )

    def _idle(self) -> list[Instance]:
        """The models that may be stopped, in this order."""
        return [run for run in self._by_use() if not run.n_users]

    def _by_use(self) -> list[Instance]:
        runs = [run for run in self._runs.values() if run.phase is Phase.READY]
        return sorted(
            runs,
            key=lambda run: (not run.closing, run.status is not Status.SLEEPING, run.last_use),
        )

    def _close_for(self, pending: PendingLoad | None) -> None:
        """Close models to new requests if a load was overtaken too often; open the others."""
        closing: list[Instance] = []
        if pending is not None and pending is self._first() and pending.n_overtaken >= PATIENCE:
            closing = self._victims(pending, [], self._by_use()) or []
        for run in self._by_use():
            run.closing = run in closing
            for lease in () if run.closing else self._take_line(run.name):
                self._grant(run, lease)

    def _to_estimate(self) -> Iterator[str]:
        for pending in self._queue:
            if pending.need is None and pending.name not in self._asked:
                self._asked.add(pending.name)
                yield pending.name

    # -- the queue

    def _pend(self, name: str) -> PendingLoad:
        pending = self._find(name)
        if pending is None:
            known = None if self.is_measured else self._needs.get(name)
            pending = PendingLoad(name, known if known is not None or self.max_memory else 0)
            self._queue.append(pending)
        return pending

    def _find(self, name: str) -> PendingLoad | None:
        return next((pending for pending in self._queue if pending.name == name), None)

    def _unheld(self) -> list[PendingLoad]:
        return [pending for pending in self._queue if pending.name not in self._held]

    def _first(self) -> PendingLoad | None:
        return next(iter(self._unheld()), None)

    def _take_line(self, name: str) -> list[Lease]:
        """Take those that wait for a model out of its line, and the model out of the queue."""
        if (pending := self._find(name)) is not None:
            self._queue.remove(pending)
        return self._lines.pop(name, [])

    def _grant(self, run: Instance, lease: Lease) -> None:
        lease.process = run
        run.n_users += 1
        self._use(run)
        lease.changed()

    def _use(self, run: Instance) -> None:
        self._n_uses += 1
        run.last_use = self._n_uses


def _too_large(pending: PendingLoad, limit: int, is_measured: bool) -> ModelLoadError:
    needs, allowed = (f"{n / 2**20:,.0f} MiB" for n in (pending.need or 0, limit))
    if is_measured:
        return ModelLoadError(
            f"The model {pending.name!r} needs about {needs} of memory, more than the {allowed} "
            "that would be free without the others."
        )
    return ModelLoadError(
        f"The model {pending.name!r} needs about {needs} of memory, more than the {allowed} that "
        "all models together may have (--models-memory)."
    )
