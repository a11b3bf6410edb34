"""Structured concurrency that Trio and trio-util do not provide."""

from __future__ import annotations

import enum
import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar, copy_context
from functools import partial
from types import MappingProxyType, TracebackType
from typing import Generic, NoReturn, Self, TypeAlias, TypeVar

import trio
from trio_util import AsyncValue

from trioserve.errors import (
    DeadlineExceededError,
    ServerClosingError,
    TrioServeError,
    first_error,
    raised_alone,
)
from trioserve.log import get_logger

_T = TypeVar("_T")
_log = get_logger("trioserve.concurrency")

#: Seconds that a pause of the process costs a peer at most: see `Patience`.
TURN = 1.0

#: Seconds before the next round after one that has failed: see `repeat`.
_REST = 1.0


@asynccontextmanager
async def alongside(*functions: Callable[[], Awaitable[object]]) -> AsyncIterator[trio.Nursery]:
    """Run async functions while a block runs, then cancel them. The block may start more.

    An exception in the block propagates unchanged, not in the exception group of a nursery.
    If a function fails, the block is cancelled and the group propagates, with the exception of
    the block as its context. If a function fails while it is cancelled, the group contains both.
    """
    failure: BaseException | None = None
    has_failed_first = False
    try:
        async with trio.open_nursery() as nursery:
            for function in functions:
                nursery.start_soon(function)
            try:
                yield nursery
            except BaseException as error:
                failure, has_failed_first = error, nursery.cancel_scope.cancel_called
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        is_cancelled = _is_cancelled(group)
        # If both were cancelled from outside, one `Cancelled` says it, as it would without us.
        if failure is None or (has_failed_first and not is_cancelled):
            group.__context__, failure = failure, group
        elif not is_cancelled:
            failure = BaseExceptionGroup(group.message, [failure, *group.exceptions])
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # this frame is in its traceback


def _is_cancelled(error: BaseException) -> bool:
    """True if an exception is `Cancelled`, or a group that contains nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)


@contextmanager
def deadline_scope(
    deadline: float, message: str = "The request's deadline has passed."
) -> Iterator[None]:
    """Cancel a block at a deadline (`trio.current_time`); infinity: never.

    Raises:
        DeadlineExceededError: the deadline has passed, in the block or before it; `message` is its
            message.
    """
    if deadline <= trio.current_time():
        raise DeadlineExceededError(message)
    with trio.CancelScope(deadline=deadline) as scope:
        yield
    if scope.cancelled_caught:
        raise DeadlineExceededError(message)


class Patience:
    """Waits for a peer, for a number of seconds in all.

    They are counted in turns of at most `TURN` seconds in which the peer does nothing. So if the
    whole process stands still (by SIGSTOP, or in a virtual machine that is suspended), the peer
    loses one turn, and has the rest of the time after that.
    """

    def __init__(self, seconds: float) -> None:
        self._left = seconds

    async def wait(self, call: Callable[[], Awaitable[_T]]) -> _T:
        """Call a function, and return its result. When cancelled, the function must lose nothing:
        each turn calls it again.

        Raises:
            TooSlowError: the time is over.
        """
        while self._left > 0:
            with trio.move_on_after(min(self._left, TURN)):
                return await call()
            self._left -= TURN
        raise trio.TooSlowError


class Bell:
    """Wakes the tasks that wait. Rings before a task waits count as one."""

    def __init__(self) -> None:
        self._rung = trio.Event()

    def ring(self) -> None:
        """Wake the waiting tasks, or else the next one that waits."""
        self._rung.set()

    async def wait(self) -> None:
        """Wait for a ring. When cancelled, the ring is kept for the next call."""
        rung = self._rung
        await rung.wait()
        if self._rung is rung:  # otherwise another task got here first
            self._rung = trio.Event()


class Feed(Generic[_T]):
    """A queue with an end, for one reader.

    `put` and `end` are synchronous and never wait. A writer that must not run ahead of the reader
    awaits `room` before it puts.

    Args:
        size: number of unread items above which `room` waits.
        weigh: gives the size of an item, such as its bytes, where they do not count as one each.
    """

    def __init__(self, size: float = math.inf, weigh: Callable[[_T], float] | None = None) -> None:
        self._items: deque[_T] = deque()
        self._size, self._weigh = size, weigh
        self._weight = 0.0  # of the unread items
        #: True if `end` was called. Unread items may remain.
        self.is_over = False
        self._error: Exception | None = None
        #: Wakes who waits. A `ParkingLot` for one task would double the cost of a wake-up.
        self._reader: Callable[[], object] | None = None
        self._writers = trio.lowlevel.ParkingLot()

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: _T) -> None:
        """Add an item, and wake the reader. After the end, the item is dropped."""
        if not self.is_over:
            self._items.append(item)
            self._weight += 1 if self._weigh is None else self._weigh(item)
            if self._reader is not None:
                self._wake()

    def end(self, error: Exception | None = None, *, now: bool = False) -> None:
        """End the queue, with an error for the reader or without. Only the first end counts.

        The reader first gets the unread items; with `now`, these are dropped.
        """
        if self.is_over:
            return
        self.is_over, self._error = True, error
        if now:
            self._items.clear()
            self._weight = 0.0
        self._wake()
        self._writers.unpark_all()

    @trio.lowlevel.enable_ki_protection
    def _wake(self) -> None:
        """Wake the reader, if it waits."""
        reader, self._reader = self._reader, None
        if reader is not None:
            reader()

    def call_when_ready(self, function: Callable[[], object]) -> None:
        """Call a function, once, as soon as there is an item, or the end.

        So one task may read many feeds. No task may `wait` for this one meanwhile.
        """
        self._reader = function
        if self._items or self.is_over:
            self._wake()

    async def room(self) -> None:
        """Wait until less than `size` is unread, or the queue has ended. A checkpoint."""
        if not self.is_full:
            await trio.lowlevel.checkpoint()
        while self.is_full:
            await self._writers.park()

    @property
    def is_full(self) -> bool:
        """True if `room` would block."""
        return not self.is_over and self._weight >= self._size

    def check(self) -> None:
        """Raise the error of `end` if it is the next thing to read."""
        if self._error is not None and not self._items:
            raise self._error

    @trio.lowlevel.enable_ki_protection
    async def wait(self) -> None:
        """Wait for an item or the end. A checkpoint.

        Raises:
            BusyResourceError: another task reads this queue.
        """
        if self._items or self.is_over:
            await trio.lowlevel.checkpoint()
        while not (self._items or self.is_over):
            if self._reader is not None:
                raise trio.BusyResourceError("another task reads this queue")
            self._reader = partial(trio.lowlevel.reschedule, trio.lowlevel.current_task())
            await trio.lowlevel.wait_task_rescheduled(self._abort)

    def _abort(self, _raise_cancel: object) -> trio.lowlevel.Abort:
        self._reader = None
        return trio.lowlevel.Abort.SUCCEEDED

    def __aiter__(self) -> AsyncIterator[_T]:
        return self

    async def __anext__(self) -> _T:
        """Wait for the next item and take it. A checkpoint; cancelling it loses no item.

        Raises:
            StopAsyncIteration: the queue has ended without an error.
            Exception: the error of `end`.
            BusyResourceError: as for `wait`.
        """
        await self.wait()
        self.check()
        if not self._items:
            raise StopAsyncIteration
        item = self._items.popleft()
        self._weight -= 1 if self._weigh is None else self._weigh(item)
        self._writers.unpark_all()
        return item


class Phase(enum.Enum):
    """The phases of a `Gate`, in their order."""

    OPEN = "open"
    DRAINING = "draining"  # refuses new work, and lets the rest finish
    CLOSED = "closed"  # has ended all work


#: The gates whose work this task does, and whether it has begun: see `Gate.inside`.
_inside: ContextVar[Mapping[Gate, bool]] = ContextVar("inside", default=MappingProxyType({}))


class Gate:
    """Admits work, counts it, and ends it. Everything that drains and closes has one."""

    def __init__(self) -> None:
        self._refusal: TrioServeError = ServerClosingError()  # for new work
        self._error: TrioServeError = self._refusal  # for work that is ended
        self._ends: dict[object, Callable[[TrioServeError], object]] = {}
        #: The phase, to read and to wait for. Only the gate sets it.
        self.phase = AsyncValue(Phase.OPEN)
        #: The number of open blocks.
        self.n_open = AsyncValue(0)

    def check(self) -> None:
        """Check that work is admitted. Draining lets work `inside` finish.

        Raises:
            ServerClosingError: it is not.
            TrioServeError: the error of `end`, if `refuse` was not called before.
        """
        phase = self.phase.value
        if phase is not Phase.OPEN and (phase is Phase.CLOSED or self not in _inside.get()):
            raise self._refusal.again()

    @contextmanager
    def open(self, on_end: Callable[[TrioServeError], object] | None = None) -> Iterator[None]:
        """Admit a block of work, and count it. `end` cancels the block, which then raises.

        Args:
            on_end: called by `end` with the error, in place of cancelling the block. Without it,
                the block is `inside`.

        Raises:
            TrioServeError: as `check`, before the block; the error of `end`, in place of what the
                block was cancelled in.
        """
        self.check()
        key, scope = object(), trio.CancelScope()
        self._ends[key] = on_end or (lambda error: scope.cancel(reason=error.message))
        self.n_open.value += 1
        try:
            if on_end is not None:
                yield
            else:
                with scope, self.inside():
                    yield
        finally:
            del self._ends[key]
            self.n_open.value -= 1
        if scope.cancelled_caught:
            raise self._error.again()

    @property
    def has_begun(self) -> bool:
        """True if the current task does work that has begun: see `inside`."""
        return _inside.get().get(self, False)

    @contextmanager
    def inside(self, *, has_begun: bool = False) -> Iterator[None]:
        """Do work in a block that belongs to a block of `open`: draining lets it finish.

        Args:
            has_begun: whether it continues work that has waited for its place already.
        """
        token = _inside.set({**_inside.get(), self: has_begun or self.has_begun})
        try:
            yield
        finally:
            _inside.reset(token)

    def refuse(self) -> None:
        """Refuse new work from now on; running work continues."""
        if self.phase.value is Phase.OPEN:
            self.phase.value = Phase.DRAINING

    def end(self, error: TrioServeError | None = None) -> None:
        """Admit no work, and end what is open. Synchronous: await `drained` for the end of it."""
        self._error = error or self._error
        if self.phase.value is Phase.OPEN:
            self._refusal = self._error
        self.phase.value = Phase.CLOSED
        for end in list(self._ends.values()):
            end(self._error.again())

    async def drained(self) -> None:
        """Wait until nothing is open."""
        await self.n_open.wait_value(0)

    async def drain(self, deadline: float, error: TrioServeError | None = None) -> None:
        """Admit no new work, and `end` what is still open at a time (`trio.current_time`)."""
        self.refuse()
        with trio.move_on_at(deadline) as scope:
            await self.drained()
        if scope.cancelled_caught:
            self.end(error)


# -- what lives as long as an app

#: Gets the error of a job; see `Jobs.begin`.
Failed: TypeAlias = Callable[[TrioServeError], object]


class Jobs:
    """Jobs that end with an app. One that fails, fails alone.

    They run while `run` does. One that begins before waits for it; one that begins after its end is
    refused.

    Args:
        gate: refuses jobs, too; `run` ends it.
    """

    def __init__(self, gate: Gate | None = None) -> None:
        self.gate = gate or Gate()
        #: True once `run` was called.
        self.have_begun = False
        self._early: list[Callable[[], Awaitable[bool]]] = []
        self._start: Callable[[Callable[[], Awaitable[bool]]], object] = self._early.append

    def begin(
        self, job: Callable[[], Awaitable[object]], failed: Failed = lambda error: None
    ) -> None:
        """Begin a job, in the context of `run`, not of the request that was the occasion for it.

        Args:
            job: what to do.
            failed: called with its error. One that is no `TrioServeError` is logged before.

        Raises:
            ServerClosingError: the end has begun.
        """
        self.gate.check()
        self._start(partial(alone, job, failed))

    async def run(self) -> NoReturn:
        """Run jobs until cancelled, and cancel those that still run."""
        async with trio.open_nursery() as nursery:
            context = copy_context()
            self._start = lambda job: context.run(partial(nursery.start_soon, job))
            self.have_begun = True
            try:
                for job in self._early:
                    nursery.start_soon(job)
                await trio.sleep_forever()
            finally:
                self.gate.end()
        raise AssertionError


async def alone(work: Callable[[], Awaitable[object]], failed: Failed = lambda error: None) -> bool:
    """Do work that must not end what runs beside it; returns whether it failed. As `Jobs.begin`."""
    try:
        try:
            await work()
            return False
        except* Exception as group:
            failed(_error_of_job(group))
    except* Exception as group:
        _log.error("the failure of a job could not be noted", exc_info=raised_alone(group))
    return True


def _error_of_job(group: ExceptionGroup[Exception]) -> TrioServeError:
    error = raised_alone(group)
    if isinstance(error, TrioServeError):
        return error
    _log.error("a job has failed", exc_info=error)
    return TrioServeError(f"An unexpected error: {first_error(error)!r}")


async def repeat(work: Callable[[], Awaitable[object]]) -> NoReturn:
    """Do work again and again until cancelled, after a round that fails, too."""
    while True:
        if await alone(work, _tell):
            await trio.sleep(_REST)


def _tell(error: TrioServeError) -> None:
    _log.error("this is tried again", problem=error.message)


class EnteredOnce(ABC):
    """An object with an ``async with`` block that is entered once. `_live` makes the block."""

    _life: AbstractAsyncContextManager[None] | None = None

    @abstractmethod
    def _live(self) -> AbstractAsyncContextManager[None]:
        """Make the block that is entered."""

    async def __aenter__(self) -> Self:
        name = type(self).__name__
        if not trio.lowlevel.in_trio_run():
            raise RuntimeError(f"a {name} needs Trio: use `trio.run`")
        if self._life is not None:
            raise RuntimeError(f"a {name} can be entered only once")
        self._life = self._live()
        await self._life.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> bool | None:
        assert self._life is not None
        return await self._life.__aexit__(exc_type, exc, traceback)


async def all_of(calls: Sequence[Callable[[], Awaitable[_T]]]) -> list[_T]:
    """Run calls concurrently, and return their results.

    Raises:
        TrioServeError: one of them failed; the others are cancelled.
    """
    if len(calls) == 1:
        return [await calls[0]()]
    results: dict[int, _T] = {}
    failures: list[TrioServeError] = []

    async def make(index: int, call: Callable[[], Awaitable[_T]]) -> None:
        try:
            results[index] = await call()
        except TrioServeError as error:
            failures.append(error)  # raised below, outside of the nursery's exception group
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index, call in enumerate(calls):
            nursery.start_soon(make, index, call)
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(calls))]


def check_cancelled() -> None:
    """Raise `trio.Cancelled` if the caller of this worker thread is cancelled. For long loops.

    In other threads, such as that of the event loop, it does nothing.
    """
    with suppress(RuntimeError):
        trio.from_thread.check_cancelled()


def has_no_thread(error: BaseException) -> bool:
    """True if an exception is Python's for a thread that the system refuses to start."""
    return isinstance(error, RuntimeError) and str(error) == "can't start new thread"


async def run_in_worker(
    work: Callable[[], object], limiter: trio.CapacityLimiter | None = None
) -> None:
    """Do short work in a worker thread, or here if the system refuses a thread.

    For work that no request waits for, such as cleanup.
    """
    try:
        await trio.to_thread.run_sync(work, limiter=limiter)
    except RuntimeError as error:
        if not has_no_thread(error):
            raise
        work()
