"""Structured concurrency that Trio does not provide, and threads for long work."""

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

#: The most work (characters to tokenize, token ids) to do on the event loop, where it takes about
#: 1 ms.
SMALL = 4096

#: Work calls this regularly. It returns True when the caller has given up.
Stop = Callable[[], bool]

#: Threads for work on prompts, and separate ones for requests that only convert between tokens and
#: text.
_N_THREADS = 4
_N_ASIDE = 2


class deadline_scope:  # noqa: N801 - used as the functions of Trio that make scopes
    """Cancel a block at a deadline (`trio.current_time`); infinity: never.

    Raises:
        DeadlineExceededError: the deadline has passed, in the block or before it.
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
    """Wait until all tokens of a limiter are free, including those of abandoned threads."""
    places = [object() for _ in range(int(limiter.total_tokens))]
    for place in places:
        await limiter.acquire_on_behalf_of(place)
    for place in places:
        limiter.release_on_behalf_of(place)


class Gate(Protocol):
    """Checks whether a server is open."""

    closed: bool

    def check_open(self) -> None:
        """Raise ServerClosingError when the server drains or is closed."""


async def offload(work: Callable[[], _T], cost: float, small: int = SMALL) -> _T:
    """Run work on the event loop, or in a thread if its cost exceeds `small` (about 1 ms).

    It is a checkpoint only when the work runs in a thread.
    """
    return work() if cost <= small else await trio.to_thread.run_sync(work)


class Workers:
    """Runs short work on the event loop, and long work in one of a few threads.

    Cancelling the caller sets the stop flag of its work and returns at once. The abandoned thread
    counts as busy until the work checks the flag.
    """

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._threads = trio.CapacityLimiter(_N_THREADS)
        self._aside = trio.CapacityLimiter(_N_ASIDE)

    async def offload(
        self, work: Callable[[Stop], _T], cost: float = math.inf, *, aside: bool = False
    ) -> _T:
        """Run work on the event loop, or in a thread if it is long. Always a checkpoint.

        Args:
            work: called with a function that says whether to stop.
            cost: the cost, in the unit of `SMALL`. By default the work runs in a thread.
            aside: whether to use the threads that are not reserved for prompts.

        Raises:
            ServerClosingError: the server was closed, and the work was abandoned.
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
        """Wait until all threads are idle, including abandoned ones."""
        for limiter in (self._threads, self._aside):
            await until_idle(limiter)


def _never() -> bool:
    return False


class EnteredOnce(ABC):
    """An object with an ``async with`` block that is entered once. `_live` makes the block."""

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
