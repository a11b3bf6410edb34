"""Small pieces of structured concurrency that Trio does not have, and threads for long work."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from functools import partial
from types import TracebackType
from typing import Protocol, Self, TypeVar

import trio

from trioserve.errors import (
    AbandonedError,
    DeadlineExceededError,
    ServerClosingError,
    TrioServeError,
)

_T = TypeVar("_T")

#: Work of this cost (characters to tokenize, token ids) is done on the event loop: it takes about
#: 1 ms.
SMALL = 4096

#: Asked by work now and then: whether nobody waits for it any longer.
Stop = Callable[[], bool]

#: Pieces of work that are done at the same time for prompts, and beside them for whoever asks for
#: nothing but tokens or text.
_N_THREADS = 4
_N_ASIDE = 2


class deadline_scope:  # noqa: N801 - used as the functions of Trio that make scopes
    """Give a block up when a deadline comes (`trio.current_time`); infinity: never.

    Raises:
        DeadlineExceededError: it has come, or did before the block began.
    """

    def __init__(self, deadline: float) -> None:
        self._scope = trio.CancelScope(deadline=deadline)

    def __enter__(self) -> None:
        if self._scope.deadline <= trio.current_time():
            raise DeadlineExceededError
        self._scope.__enter__()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._scope.__exit__(exc_type, exc, traceback)
        if self._scope.cancelled_caught:
            raise DeadlineExceededError


async def until_idle(limiter: trio.CapacityLimiter) -> None:
    """Wait until all places of a limiter are free, those of abandoned threads included."""
    places = [object() for _ in range(int(limiter.total_tokens))]
    for place in places:
        await limiter.acquire_on_behalf_of(place)
    for place in places:
        limiter.release_on_behalf_of(place)


class Gate(Protocol):
    """Whether a server is open."""

    closed: bool

    def check_open(self) -> None:
        """Raise ServerClosingError when the server drains or is closed."""


async def offload(work: Callable[[], _T], cost: float, small: int = SMALL) -> _T:
    """Do work here, or in a thread if it costs more than what takes about 1 ms, in its own measure.

    It is no checkpoint where the work is done here.
    """
    return work() if cost <= small else await trio.to_thread.run_sync(work)


class Workers:
    """Does small work on the event loop, and other work in one of a few threads.

    When its caller is cancelled, the work is told to stop, and goes on without anybody waiting
    for it until it looks. Its thread counts as taken until then.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._threads = trio.CapacityLimiter(_N_THREADS)
        self._aside = trio.CapacityLimiter(_N_ASIDE)

    async def offload(
        self, work: Callable[[Stop], _T], cost: float = math.inf, *, aside: bool = False
    ) -> _T:
        """Do work here, or in a thread if its cost is not `SMALL`; either way a checkpoint.

        Args:
            work: is told whether to stop.
            cost: see `SMALL`. The default is always too much for the event loop.
            aside: whether it is not for a prompt, and so leaves the threads of prompts alone.

        Raises:
            ServerClosingError: the server was closed, so that the work was given up.
        """
        if cost <= SMALL:
            await trio.lowlevel.checkpoint()
            self._gate.check_open()
            return work(_never)
        cancelled = threading.Event()
        try:
            return await trio.to_thread.run_sync(
                partial(work, lambda: cancelled.is_set() or self._gate.closed),
                limiter=self._aside if aside else self._threads,
                abandon_on_cancel=True,
            )
        except AbandonedError:
            raise ServerClosingError from None
        finally:
            cancelled.set()

    async def wait_idle(self) -> None:
        """Wait until no thread works any more, abandoned ones included."""
        for limiter in (self._threads, self._aside):
            await until_idle(limiter)


def _never() -> bool:
    return False


class EnteredOnce(ABC):
    """Something that lives inside ``async with``, once, as long as `_live` does."""

    _life: AbstractAsyncContextManager[None] | None = None

    @abstractmethod
    def _live(self) -> AbstractAsyncContextManager[None]:
        """Make the block that is entered."""

    async def __aenter__(self) -> Self:
        if self._life is not None:
            raise RuntimeError(f"a {type(self).__name__} can be entered only once")
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
    """Make calls at the same time, and return what they return.

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
            failures.append(error)  # raised below, outside of the nursery's group
            nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        for index, call in enumerate(calls):
            nursery.start_soon(make, index, call)
    if failures:
        raise failures[0]
    return [results[index] for index in range(len(calls))]
