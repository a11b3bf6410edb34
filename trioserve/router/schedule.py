"""Which models run, and who waits for one: decided without a clock, a process or a task.

A `Schedule` is told what has happened (a request came or left, a model is ready, a process ended),
and `decide` says what to do about it. Its rules:

- No more models run than there are places, and no more than fit into the memory.
- A model that has to give way is one that no request uses, and the least recently used of those.
- Models are started in the order in which they were first asked for. All requests for a model wait
  for the same start.
- A request for a model that runs does not wait. But a queue could wait forever for the place of a
  model that is never idle; so after some such requests, further ones are sent to the end of the
  queue, until the first in it has its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from enum import Enum

import attrs

from trioserve.errors import ModelLoadError, TrioServeError

#: Requests that models which run may take while the first in the queue waits for a place.
PATIENCE = 32


class _Phase(Enum):
    LOADING = 1
    READY = 2
    STOPPING = 3


@attrs.define(eq=False)
class Ticket:
    """A request's place in line for a model; once `granted`, its right to use it.

    `changed` is called when it is granted or refused. When refused, `error` says why.
    """

    model: str
    changed: Callable[[], None]
    error: TrioServeError | None = None
    _run: _Run | None = None

    @property
    def granted(self) -> bool:
        """Whether the model is ready for the request."""
        return self._run is not None


@attrs.define(eq=False)
class _Run:
    """A place that is taken: a process, from before its start until it has ended."""

    name: str
    need: int
    last_used: int
    phase: _Phase = _Phase.LOADING
    sleeping: bool = False
    closing: bool = False  # takes no more requests, because the queue has waited for long
    n_users: int = 0
    waiting: list[Ticket] = attrs.field(factory=list)  # while it loads


@attrs.define(eq=False)
class _Wish:
    """An entry of the queue: a model that is to be started, and the requests that wait for it."""

    name: str
    need: int | None  # bytes; None: not known yet
    wanted: bool = False  # even if no request waits
    n_overtaken: int = 0
    tickets: list[Ticket] = attrs.field(factory=list)


@attrs.frozen
class Decision:
    """What is to be done now: whose process to start, whose to stop, whose memory to estimate."""

    start: tuple[str, ...] = ()
    stop: tuple[str, ...] = ()
    estimate: tuple[str, ...] = ()


class Schedule:
    """Decides which models run.

    Args:
        max_models: how many may run at the same time; 0: any number.
        max_memory: bytes that they may need together; 0: any number.
    """

    def __init__(self, *, max_models: int = 0, max_memory: int = 0) -> None:
        self.max_models = max_models
        self.max_memory = max_memory
        self._runs: dict[str, _Run] = {}
        self._queue: list[_Wish] = []
        self._needs: dict[str, int] = {}
        self._asked: set[str] = set()  # whose need is being estimated
        self._held: set[str] = set()
        self._n_uses = 0  # numbers the uses, so that the least recent one can be found

    # -- what requests do

    def join(self, name: str, changed: Callable[[], None]) -> Ticket:
        """A request asks for a model. It must `leave` in the end, whatever becomes of it."""
        ticket = Ticket(name, changed)
        run = self._runs.get(name)
        if run is not None and run.phase is _Phase.LOADING:
            run.waiting.append(ticket)
        elif run is not None and self.is_free(name):
            self._grant(run, ticket)
            if (first := self._first()) is not None:
                first.n_overtaken += 1
        else:
            self._wish(name).tickets.append(ticket)
        return ticket

    def is_free(self, name: str) -> bool:
        """Whether a request that joins would be granted its model at once."""
        run = self._runs.get(name)
        return run is not None and run.phase is _Phase.READY and not run.closing

    def leave(self, ticket: Ticket) -> None:
        """The request has ended, or does not wait any longer."""
        if ticket._run is not None:
            ticket._run.n_users -= 1
            self._use(ticket._run)
            ticket._run = None
            return
        run, wish = self._runs.get(ticket.model), self._find(ticket.model)
        if run is not None and ticket in run.waiting:
            run.waiting.remove(ticket)
        elif wish is not None and ticket in wish.tickets:
            wish.tickets.remove(ticket)
            self._drop_if_empty(wish)

    def position(self, ticket: Ticket) -> int:
        """How many waiting requests are before this one."""
        run = self._runs.get(ticket.model)
        if run is not None and ticket in run.waiting:
            return run.waiting.index(ticket)
        line = [one for wish in self._queue for one in wish.tickets]
        return line.index(ticket) if ticket in line else 0

    # -- what others ask for

    def want(self, name: str) -> None:
        """Start a model as soon as there is a place, even if no request waits for it."""
        if name not in self._runs or self._runs[name].phase is _Phase.STOPPING:
            self._wish(name).wanted = True

    def unload(self, name: str, error: TrioServeError) -> bool:
        """Take a model's place away. Requests that use it may end; those that wait are refused.

        Returns whether its process is now to be stopped.
        """
        self.refuse(name, error)
        if (run := self._runs.get(name)) is not None:
            self._refuse_all(run.waiting, error)
        return self.stop(name)

    def stop(self, name: str) -> bool:
        """Like `unload`, but those that wait go on waiting, for the next start."""
        run = self._runs.get(name)
        if run is None or run.phase is _Phase.STOPPING:
            return False
        run.phase = _Phase.STOPPING
        if run.waiting:
            wish = self._wish(name)
            wish.tickets[:0] = run.waiting
            run.waiting.clear()
        return True

    def refuse(self, name: str, error: TrioServeError) -> None:
        """Take a model out of the queue, and refuse those that wait for it there."""
        if (wish := self._find(name)) is not None:
            self._queue.remove(wish)
            self._refuse_all(wish.tickets, error)

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
        run.sleeping = False
        if run.phase is not _Phase.LOADING:
            return  # it woke up, or is being stopped
        run.phase = _Phase.READY
        self._use(run)
        for ticket in run.waiting:
            self._grant(run, ticket)
        run.waiting.clear()

    def asleep(self, name: str) -> None:
        """A model has freed its memory until the next request. It is the first to give way."""
        self._runs[name].sleeping = True

    def dying(self, name: str) -> None:
        """A process has died, though it is not `gone` yet: it takes no more requests."""
        if self._runs[name].phase is _Phase.READY:
            self._runs[name].phase = _Phase.STOPPING

    def gone(self, name: str, error: TrioServeError) -> None:
        """A process has ended. Those that waited for it to load are refused."""
        self._refuse_all(self._runs.pop(name).waiting, error)

    def estimated(self, name: str, need: int) -> None:
        """The memory that a model needs is known."""
        self._needs[name] = need
        self._asked.discard(name)
        if (wish := self._find(name)) is not None:
            wish.need = need

    def not_estimated(self, name: str, error: TrioServeError) -> None:
        """It cannot be known what a model needs: those that wait for it are refused."""
        self._asked.discard(name)
        self.refuse(name, error)

    def forget(self, name: str) -> None:
        """A model has changed, so that what it needs has to be estimated again."""
        self._needs.pop(name, None)

    # -- what is to be seen

    def need_of(self, name: str) -> int | None:
        """The bytes that a model needs, if they are known."""
        return self._needs.get(name)

    def n_users(self, name: str) -> int:
        """How many requests use a model."""
        run = self._runs.get(name)
        return run.n_users if run is not None else 0

    def is_loading(self, name: str) -> bool:
        """Whether a model has a place and is not ready."""
        run = self._runs.get(name)
        return run is not None and run.phase is _Phase.LOADING

    def is_queued(self, name: str) -> bool:
        """Whether a model waits for a place."""
        return self._find(name) is not None

    @property
    def has_waiting(self) -> bool:
        """Whether any request waits."""
        return next(self.waiting(), None) is not None

    def waiting(self, name: str | None = None) -> Iterator[Ticket]:
        """The requests that wait, for one model or for all."""
        for run in self._runs.values():
            if name in (None, run.name):
                yield from run.waiting
        for wish in self._queue:
            if name in (None, wish.name):
                yield from wish.tickets

    def decide(self) -> Decision:
        """Say what to do, and count it as done: what starts is loading, what stops is stopping."""
        start: list[str] = []
        stop: list[str] = []
        for wish in [one for one in self._queue if one.need and self._is_too_large(one.need)]:
            self.refuse(wish.name, _too_large(wish, self.max_memory))
        planned: list[_Wish] = []  # wishes that get what is being freed
        short: _Wish | None = None  # the first one for which too little can be freed now
        for wish in self._unheld():
            run = self._runs.get(wish.name)
            if wish.need is None or (run is not None and run.phase is not _Phase.STOPPING):
                break
            victims = self._victims(wish, planned, self._idle())
            if victims is None:
                short = wish
                break
            for victim in victims:
                victim.phase = _Phase.STOPPING
                stop.append(victim.name)
            if planned or run is not None or not self._has_room(self._runs.values(), wish):
                planned.append(wish)
            else:
                self._start(wish)
                start.append(wish.name)
        self._close_for(short)
        return Decision(tuple(start), tuple(stop), tuple(self._to_estimate()))

    def _start(self, wish: _Wish) -> None:
        self._queue.remove(wish)
        run = _Run(wish.name, wish.need or 0, self._n_uses, waiting=wish.tickets)
        self._runs[wish.name] = run

    def _victims(
        self, wish: _Wish, planned: list[_Wish], candidates: Iterable[_Run]
    ) -> list[_Run] | None:
        """The first of the candidates whose places are enough for a wish; None: all are not."""
        staying: list[_Run | _Wish] = [*planned]
        staying += [run for run in self._runs.values() if run.phase is not _Phase.STOPPING]
        chosen: list[_Run] = []
        for run in candidates:
            if self._has_room(staying, wish):
                break
            staying.remove(run)
            chosen.append(run)
        if not self._has_room(staying, wish):
            return None
        for run in reversed(chosen[:-1]):  # some that are small may stay, for one that is large
            if self._has_room([*staying, run], wish):
                staying.append(run)
                chosen.remove(run)
        return chosen

    def _has_room(self, others: Iterable[_Run | _Wish], wish: _Wish) -> bool:
        """Whether a wish can be granted beside others."""
        needs = [one.need or 0 for one in (*others, wish)]
        too_many = 0 < self.max_models < len(needs)
        return not too_many and not self._is_too_large(sum(needs))

    def _is_too_large(self, need: int) -> bool:
        return 0 < self.max_memory < need

    def _idle(self) -> list[_Run]:
        """Those that may have to give way, in this order."""
        return [run for run in self._by_use() if not run.n_users]

    def _by_use(self) -> list[_Run]:
        runs = [run for run in self._runs.values() if run.phase is _Phase.READY]
        return sorted(runs, key=lambda run: (not run.closing, not run.sleeping, run.last_used))

    def _close_for(self, wish: _Wish | None) -> None:
        """Have models take no more requests if a wish was overtaken too often; open the others."""
        closing: list[_Run] = []
        if wish is not None and wish is self._first() and wish.n_overtaken >= PATIENCE:
            closing = self._victims(wish, [], self._by_use()) or []
        for run in self._by_use():
            run.closing = run in closing
            own = None if run.closing else self._find(run.name)
            if own is not None:
                self._queue.remove(own)
                for ticket in own.tickets:
                    self._grant(run, ticket)

    def _to_estimate(self) -> Iterator[str]:
        for wish in self._queue:
            if wish.need is None and wish.name not in self._asked:
                self._asked.add(wish.name)
                yield wish.name

    # -- the queue

    def _wish(self, name: str) -> _Wish:
        wish = self._find(name)
        if wish is None:
            wish = _Wish(name, self._needs.get(name, None if self.max_memory else 0))
            self._queue.append(wish)
        return wish

    def _find(self, name: str) -> _Wish | None:
        return next((wish for wish in self._queue if wish.name == name), None)

    def _unheld(self) -> list[_Wish]:
        return [wish for wish in self._queue if wish.name not in self._held]

    def _first(self) -> _Wish | None:
        return next(iter(self._unheld()), None)

    def _drop_if_empty(self, wish: _Wish) -> None:
        if not wish.tickets and not wish.wanted:
            self._queue.remove(wish)

    def _grant(self, run: _Run, ticket: Ticket) -> None:
        ticket._run = run
        run.n_users += 1
        self._use(run)
        ticket.changed()

    def _use(self, run: _Run) -> None:
        self._n_uses += 1
        run.last_used = self._n_uses

    def _refuse_all(self, tickets: list[Ticket], error: TrioServeError) -> None:
        for ticket in tickets:
            ticket.error = error
            ticket.changed()
        tickets.clear()


def _too_large(wish: _Wish, limit: int) -> ModelLoadError:
    needs, allowed = (f"{n / 2**20:,.0f} MiB" for n in (wish.need or 0, limit))
    return ModelLoadError(
        f"The model {wish.name!r} needs about {needs} of memory, more than the {allowed} that all "
        "models together may have (--models-memory)."
    )
