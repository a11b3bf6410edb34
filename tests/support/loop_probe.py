"""How long the event loop is held up while something happens."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio


@attrs.define
class Probe:
    """The longest gaps between two turns of a task that wants one each millisecond, in seconds.

    Other processes on the machine do not count: `held` is processor time of the loop's thread, and
    `stalled` that of the whole process, so with a thread that keeps the interpreter's lock.
    """

    held: float = 0.0
    stalled: float = 0.0
    wall: float = 0.0

    async def run(self) -> None:
        while True:
            thread, process, wall = time.thread_time(), time.process_time(), time.perf_counter()
            await trio.sleep(0.001)
            self.held = max(self.held, time.thread_time() - thread)
            self.stalled = max(self.stalled, time.process_time() - process)
            self.wall = max(self.wall, time.perf_counter() - wall)


@asynccontextmanager
async def probing() -> AsyncIterator[Probe]:
    """Watch the loop while a block runs. What it waits for should be done by other threads."""
    probe = Probe()
    gc.collect()
    gc.freeze()  # as the command does: what is there already is not looked at again
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(probe.run)
            await trio.sleep(0.01)
            yield probe
            nursery.cancel_scope.cancel()
    finally:
        gc.unfreeze()
