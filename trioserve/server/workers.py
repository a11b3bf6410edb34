"""Threads for long work on prompts and outputs."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar

import trio

from trioserve.concurrency import until_idle
from trioserve.errors import AbandonedError, ServerClosingError

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
