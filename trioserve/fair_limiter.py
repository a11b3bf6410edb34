"""`FairLimiter`: places for work, which clients take in turns."""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import TypeVar, cast

import attrs
import trio

from trioserve.concurrency import Gate
from trioserve.errors import QueueFullError

_T = TypeVar("_T")

#: The tasks of one client that may wait for a place: more than the default of `Config.max_queue`.
MAX_WAITING = 2048

#: Weight of the newest time in the moving average, and the longest `retry_after`.
_WEIGHT = 0.2
_MAX_RETRY_AFTER = 60.0

# -- the client

_client: ContextVar[str] = ContextVar("trioserve.client", default="")


def current_client() -> str:
    """The client that this task works for: an API key or an address. Empty: not known."""
    return _client.get()


def set_client(client: str) -> None:
    """Set the client of this task, and of the tasks that it starts."""
    _client.set(client)


@contextmanager
def working_for(client: str) -> Iterator[None]:
    """Set the client for a block. Empty: the client stays the same."""
    token = _client.set(client or _client.get())
    try:
        yield
    finally:
        _client.reset(token)


# -- the limiter


class FairLimiter:
    """Limits how much work runs at the same time, and shares the places between clients.

    A place goes to the waiting client that holds the fewest places; of those that hold equally
    many, to the one that has waited longest since its last turn. So of k clients that always want
    more, each gets 1/k of the places, even if one of them starts more tasks. Tasks of one client
    take their turns in the order of arrival.

    The client is `current_client`.

    Args:
        n_places: the places of all clients together.
        n_each: the places that one client may hold. If they are fewer, a second client finds a
            place at once, even if the work of the first one takes long.
        max_waiting: the tasks of one client that may wait.
    """

    def __init__(
        self, n_places: int, n_each: int | None = None, *, max_waiting: int = MAX_WAITING
    ) -> None:
        self.n_places = n_places
        self.n_each = n_places if n_each is None else n_each
        self._max_waiting = max_waiting
        self._held: Counter[str] = Counter()  # only clients that hold a place
        self._n_held = 0
        #: Clients that wait, in the order of their turns.
        self._waiting: dict[str, deque[trio.lowlevel.Task]] = {}
        self._seconds = 0.0  # moving average of the time that a place is held
        self._idle = trio.lowlevel.ParkingLot()

    @property
    def n_held(self) -> int:
        """The places that are taken."""
        return self._n_held

    @property
    def n_waiting(self) -> int:
        """The tasks that wait for a place."""
        return sum(map(len, self._waiting.values()))

    @asynccontextmanager
    async def place(self) -> AsyncIterator[None]:
        """Hold a place during a block. When cancelled before, no place is taken.

        Raises:
            QueueFullError: too many tasks of the client wait; has a time to retry after.
        """
        client = current_client()
        await self._acquire(client)
        began = trio.current_time()
        try:
            yield
        finally:
            self._release(client, began)

    async def run_sync(
        self, work: Callable[[], _T], *, seconds: float = math.inf, abandon_on_cancel: bool = False
    ) -> _T:
        """Run work in a worker thread, which holds a place as long as it runs.

        Args:
            work: what to run.
            seconds: the time that the work may take, without the wait for a place. When it is over,
                the thread is abandoned, or else the work has to call `check_cancelled`.
            abandon_on_cancel: whether a cancelled call leaves the thread to itself. The place stays
                taken until the thread ends.

        Raises:
            TooSlowError: the time is over.
            QueueFullError: as `place`.
        """
        with trio.CancelScope() as scope:
            turn = _ThreadTurn(self, current_client(), scope, seconds)
            return await trio.to_thread.run_sync(
                work,
                limiter=cast(trio.CapacityLimiter, turn),  # Trio calls two methods of it
                abandon_on_cancel=abandon_on_cancel,
            )
        raise trio.TooSlowError

    async def until_idle(self) -> None:
        """Wait until no place is taken, also by abandoned threads."""
        await trio.lowlevel.checkpoint_if_cancelled()
        while self._n_held:
            await self._idle.park()

    async def _acquire(self, client: str) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        if self._may_start(client):
            self._take(client)
            await trio.lowlevel.cancel_shielded_checkpoint()
            return
        waiting = self._waiting.get(client, ())
        if len(waiting) >= self._max_waiting:
            raise QueueFullError(
                f"This client has as many requests as it may: {self._held[client]} running and "
                f"{len(waiting)} waiting for the same work.",
                retry_after=self._retry_after(len(waiting)),
            )
        await self._wait(client)

    @trio.lowlevel.enable_ki_protection
    async def _wait(self, client: str) -> None:
        """Wait for a place. `_hand_out` takes it for the task before it wakes it."""
        task = trio.lowlevel.current_task()
        self._waiting.setdefault(client, deque()).append(task)

        def abort(_raise_cancel: object) -> trio.lowlevel.Abort:
            self._waiting[client].remove(task)
            if not self._waiting[client]:
                del self._waiting[client]
            return trio.lowlevel.Abort.SUCCEEDED

        await trio.lowlevel.wait_task_rescheduled(abort)

    def _may_start(self, client: str) -> bool:
        return self._n_held < self.n_places and self._held[client] < self.n_each

    def _take(self, client: str) -> None:
        self._held[client] += 1
        self._n_held += 1

    def _release(self, client: str, began: float) -> None:
        seconds = trio.current_time() - began
        self._seconds += (_WEIGHT if self._seconds else 1.0) * (seconds - self._seconds)
        self._n_held -= 1
        self._held[client] -= 1
        if not self._held[client]:
            del self._held[client]
        self._hand_out()
        if not self._n_held:
            self._idle.unpark_all()

    @trio.lowlevel.enable_ki_protection
    def _hand_out(self) -> None:
        """Give free places to tasks that wait."""
        while able := [client for client in self._waiting if self._may_start(client)]:
            client = min(able, key=self._held.__getitem__)
            waiting = self._waiting.pop(client)
            task = waiting.popleft()
            if waiting:
                self._waiting[client] = waiting  # the last in the order of turns
            self._take(client)
            trio.lowlevel.reschedule(task)

    def _retry_after(self, n_before: int) -> float:
        """Estimate the seconds until some tasks of a client have had their turns."""
        n_clients = len(self._held.keys() | self._waiting.keys())
        n_places = min(self.n_each, max(1, self.n_places // max(1, n_clients)))
        return min(max(1.0, math.ceil(n_before * self._seconds / n_places)), _MAX_RETRY_AFTER)


@attrs.define(eq=False)
class _ThreadTurn:
    """A client's place for one thread, as Trio takes and releases it."""

    limiter: FairLimiter
    client: str
    scope: trio.CancelScope
    seconds: float
    began: float = 0.0

    async def acquire_on_behalf_of(self, _borrower: object) -> None:
        await self.limiter._acquire(self.client)
        self.began = trio.current_time()
        self.scope.deadline = self.began + self.seconds

    def release_on_behalf_of(self, _borrower: object) -> None:
        self.limiter._release(self.client, self.began)


@attrs.define(eq=False)
class ThreadTime:
    """The CPU time that work in a thread has taken, as another thread can read it."""

    _thread: int | None = None
    _before: float = 0.0

    def begin(self) -> None:
        """Begin to measure. To be called in the thread."""
        self._before, self._thread = time.thread_time(), threading.get_ident()

    @property
    def seconds(self) -> float:
        """The time since `begin`, while the work runs; 0 where the system does not tell."""
        if self._thread is None or not hasattr(time, "pthread_getcpuclockid"):
            return 0.0
        return time.clock_gettime(time.pthread_getcpuclockid(self._thread)) - self._before


# -- limiters of a run


class LimiterOfRun:
    """Gives the `FairLimiter` of each run of Trio. It is made when it is first needed.

    Arguments are those of `FairLimiter`.
    """

    def __init__(self, n_places: int, n_each: int) -> None:
        self._make = partial(FairLimiter, n_places, n_each)
        self._limiter: trio.lowlevel.RunVar[FairLimiter] = trio.lowlevel.RunVar("limiter")

    def __call__(self) -> FairLimiter:
        """The limiter of this run."""
        try:
            return self._limiter.get()
        except LookupError:
            limiter = self._make()
            self._limiter.set(limiter)
            return limiter


#: The threads that parse, render, tokenize and write the texts of requests. They hold the GIL most
#: of the time.
text_threads = LimiterOfRun(4, 3)

#: Threads that encode speech. Each takes a few milliseconds a second of sound.
sound_threads = LimiterOfRun(4, 3)

#: Calls of tools that run at the same time: each may start processes.
tool_calls = LimiterOfRun(40, 32)

# -- long work on the texts of a model

#: The most work (characters to tokenize, token ids) to do on the event loop, where it takes about
#: 1 ms.
SMALL = 4096

#: Threads for requests that only convert between tokens and text, and those that one client may
#: have. Prompts have other threads.
_N_ASIDE, _N_ASIDE_EACH = 3, 2


async def offload(work: Callable[[], _T], cost: float, small: int = SMALL) -> _T:
    """Run work on the event loop, or in a thread if its cost exceeds `small` (about 1 ms).

    It is a checkpoint only when the work runs in a thread.

    Raises:
        QueueFullError: too much work of the client waits for a thread.
    """
    return work() if cost <= small else await text_threads().run_sync(work)


class Workers:
    """Runs short work on the event loop, and long work in one of a few threads.

    When its caller is cancelled, work in a thread ends at the next `check_cancelled`, and the
    caller waits for that. So no thread uses the model after `aclose`.
    """

    def __init__(self) -> None:
        self.gate = Gate()
        self._aside = FairLimiter(_N_ASIDE, _N_ASIDE_EACH)

    async def offload(
        self, work: Callable[[], _T], cost: float = math.inf, *, aside: bool = False
    ) -> _T:
        """Run work on the event loop, or in a thread if it is long. Always a checkpoint.

        Args:
            work: what to run.
            cost: the cost, in the unit of `SMALL`. By default the work runs in a thread.
            aside: whether to use the threads that are not reserved for prompts.

        Raises:
            ServerClosingError: the model is to be freed.
            QueueFullError: too much work of the client waits for a thread.
        """
        if cost <= SMALL:
            await trio.lowlevel.checkpoint()
            self.gate.check()
            return work()
        with self.gate.open():
            return await (self._aside if aside else text_threads()).run_sync(work)

    async def aclose(self) -> None:
        """Cancel the work in threads, and wait for its end."""
        self.gate.end()
        await self.gate.drained()
