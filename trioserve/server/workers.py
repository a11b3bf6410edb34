"""Threads for long work on prompts and outputs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import trio

from trioserve.concurrency import Gate
from trioserve.fair_limiter import FairLimiter, text_threads

_T = TypeVar("_T")

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
