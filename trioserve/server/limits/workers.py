"""Threads for work that would hold up the event loop."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import trio

from trioserve.errors import AbandonedError, ServerClosingError
from trioserve.server.concurrency import until_idle
from trioserve.server.limits.admission import Admission

_T = TypeVar("_T")

#: Work of this size (characters, token ids) is done on the event loop: it takes about 1 ms.
SMALL = 4096

#: Asked by work now and then: whether nobody waits for it any longer.
Stop = Callable[[], bool]

#: Pieces of work that are done at the same time for prompts, and beside them for whoever asks for
#: nothing but tokens or text.
_N_THREADS = 4
_N_ASIDE = 2


class Workers:
    """Does small work on the event loop, and other work in one of a few threads.

    When its caller is cancelled, the work is told to stop, and goes on without anybody waiting
    for it until it looks. Its thread counts as taken until then.
    """

    def __init__(self, admission: Admission) -> None:
        self._admission = admission
        self._threads = trio.CapacityLimiter(_N_THREADS)
        self._aside = trio.CapacityLimiter(_N_ASIDE)

    def check_open(self) -> None:
        """Raise ServerClosingError when the server drains or is closed."""
        self._admission.check_open()

    async def run(self, work: Callable[[Stop], _T], size: int) -> _T:
        """Do small work here and other work in a thread; either way a checkpoint."""
        if size <= SMALL:
            await trio.lowlevel.checkpoint()
            self._admission.check_open()
            return work(_never)
        return await self.run_in_thread(work)

    async def run_in_thread(self, work: Callable[[Stop], _T], *, aside: bool = False) -> _T:
        """Do work in a thread. Work `aside` does not take those of prompts.

        Raises:
            ServerClosingError: the server was closed, so that the work was given up.
        """
        cancelled = threading.Event()
        limiter = self._aside if aside else self._threads
        try:
            return await trio.to_thread.run_sync(
                partial(work, lambda: cancelled.is_set() or self._admission.closed),
                limiter=limiter,
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
