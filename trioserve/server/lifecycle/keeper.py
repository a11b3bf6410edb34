"""`Keeper`: runs an engine while somebody needs it, and starts another one when somebody comes."""

from __future__ import annotations

import enum
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
)
from typing import Generic, TypeVar

import attrs
import structlog
import trio
from trio_util import AsyncValue

from trioserve.errors import (
    DeadlineExceededError,
    QueueFullError,
    ServerClosingError,
    TrioServeError,
)

_log = structlog.stdlib.get_logger("trioserve.server")

_T = TypeVar("_T")

#: Seconds after which those come back who were refused because too many wait for the model.
_RETRY_AFTER = 5.0


class ServerState(enum.Enum):
    """What the model of a server does."""

    LOADING = "loading"
    READY = "ready"
    SLEEPING = "sleeping"  # it is not in memory; a request loads it
    CLOSED = "closed"


@attrs.define(eq=False)
class _Start:
    """The next start of an engine: who waits for it, first come first, and why it failed."""

    waiting: trio.lowlevel.ParkingLot = attrs.field(factory=trio.lowlevel.ParkingLot)
    error: TrioServeError | None = None


class Keeper(Generic[_T]):
    """Starts an engine when somebody comes, and ends it when it was idle for long enough.

    Those who come while there is none wait for it, and go on in the order in which they came. When
    it cannot be started, all who wait get the error, and whoever comes next has it tried again.
    An engine in use is never ended.

    Args:
        start: runs an engine for as long as a block lasts, and gives what requests use.
        retire: called with that before an engine is ended; requests may still come meanwhile.
        rest: called when an engine has ended.
        keep_alive: seconds for which an engine stays idle, where nobody who used it said
            otherwise. Below 0: for ever.
        max_waiting: how many may wait for an engine to start.
    """

    def __init__(
        self,
        start: Callable[[], AbstractAsyncContextManager[_T]],
        retire: Callable[[_T], Awaitable[None]],
        rest: Callable[[], Awaitable[None]],
        *,
        keep_alive: float,
        max_waiting: int,
    ) -> None:
        self._start = start
        self._retire = retire
        self._rest = rest
        self._default_keep_alive = self._keep_alive = keep_alive
        self._max_waiting = max_waiting
        self.state = AsyncValue(ServerState.SLEEPING)
        #: What requests use of the engine that runs. It stays when the keeper is closed.
        self.current: _T | None = None
        self._next = _Start()
        self._refuses = False
        self._closing = False
        self._n_users = 0  # those that wait for an engine included
        self._n_told = 0  # who wait for an engine to end
        self._last_used = -math.inf
        self._changed = trio.Event()  # there is something new of the above

    async def run(self) -> None:
        """Start and end engines, one at a time, until closed or cancelled.

        Raises:
            Exception: an engine ended with it, or could not be started for a reason that is not
                a `TrioServeError`.
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
                self.current = await stack.enter_async_context(self._start())
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

    async def _while_needed(self, current: _T) -> None:
        """Let those in who wait, and return when nobody has come for long enough."""
        self._keep_alive = self._default_keep_alive
        self._last_used = trio.current_time()
        self.state.value = ServerState.READY
        self._next.waiting.unpark()  # who wakes the next one
        while True:
            while trio.current_time() < self._ends_at:
                await self._until_changed(self._ends_at)
            if self._closing:
                return
            await self._retire(current)
            if trio.current_time() >= self._ends_at:
                return  # nobody came meanwhile, and from here to the end nobody else runs

    @property
    def idle_since(self) -> float | None:
        """When the engine that runs was used last; None: it is in use, or none runs."""
        idle = self.state.value is ServerState.READY and not self._n_users
        return self._last_used if idle else None

    @property
    def _ends_at(self) -> float:
        """When the engine is to end, as far as is known."""
        if self._closing:
            return -math.inf
        if self._n_users:
            return math.inf
        if self._n_told:
            return -math.inf
        return self.idle_until

    @property
    def idle_until(self) -> float:
        """When the engine ends if nobody uses it from now on; infinite: it does not."""
        last_used = trio.current_time() if self._n_users else self._last_used
        return math.inf if self._keep_alive < 0 else last_used + self._keep_alive

    async def _until_changed(self, deadline: float) -> None:
        with trio.move_on_at(deadline):
            await self._changed.wait()
            self._changed = trio.Event()

    def _fail(self, error: TrioServeError) -> None:
        """Tell those who wait that there is no engine."""
        failed, self._next = self._next, _Start()
        failed.error = error
        failed.waiting.unpark_all()

    def refuse(self) -> None:
        """Let nobody wait for an engine any more. Those who do get a `ServerClosingError`."""
        self._refuses = True
        self._fail(ServerClosingError())

    async def close(self) -> None:
        """Start no engine any more, and end the one that runs, though it may be in use.

        One that is being started or ended is left to the cancellation of `run`.
        """
        self.refuse()
        if self.current is not None:
            self._closing = True
            self._changed.set()
            await self.state.wait_value(ServerState.CLOSED)

    # -- those who use the engine

    @contextmanager
    def in_use(self, *, counts: bool = True) -> Iterator[None]:
        """Keep the engine that runs from being ended, for as long as a block lasts.

        Where it does not count, the engine has been idle meanwhile all the same.
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
        self, *, deadline: float = math.inf, keep_alive: float | None = None
    ) -> AsyncIterator[None]:
        """Have an engine run for as long as a block lasts. Waits for it to be started.

        Args:
            deadline: until when to wait (`trio.current_time`).
            keep_alive: seconds for which the engine stays idle afterwards, until it has ended or
                somebody else says otherwise. Below 0: for ever.

        Raises:
            DeadlineExceededError: the deadline came before the engine.
            QueueFullError: too many wait already.
            ServerClosingError: no engine is started any more.
            TrioServeError: it cannot be started.
        """
        with self.in_use():
            if self.current is None or self._next.waiting:
                await self._until_started(deadline)
            if keep_alive is not None:
                self._keep_alive = keep_alive
            yield

    async def _until_started(self, deadline: float) -> None:
        start = self._next
        if self._refuses:
            raise ServerClosingError
        if len(start.waiting) >= self._max_waiting:
            n_waiting = len(start.waiting)
            wait = "request waits" if n_waiting == 1 else "requests wait"
            raise QueueFullError(
                f"{n_waiting} {wait} for the model to be loaded, and no more may.",
                retry_after=_RETRY_AFTER,
            )
        self._changed.set()
        with trio.move_on_at(deadline) as scope:
            await start.waiting.park()
        if scope.cancelled_caught:
            raise DeadlineExceededError("The request's deadline has passed.")
        if start.error is not None:
            # Another one for each: an exception keeps the frames that it was raised through.
            raise type(start.error)(start.error.message) from start.error
        start.waiting.unpark()

    async def end(self) -> None:
        """Have the engine end as soon as nobody uses it, and wait until it has.

        When cancelled, it goes on.
        """
        self._n_told += 1
        self._changed.set()
        try:
            await self.state.wait_value(
                lambda state: state in (ServerState.SLEEPING, ServerState.CLOSED)
            )
        finally:
            self._n_told -= 1
