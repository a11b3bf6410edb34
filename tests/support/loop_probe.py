"""Measures how long the event loop is held up."""

from __future__ import annotations

import gc
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import trio

#: Processor seconds for the work of `_slowness` on a machine of 2021 with nothing else to do. One
#: that shares its processors with others may take three times as long.
_USUAL = 0.014


@attrs.define
class Probe:
    """The longest gaps between two turns of a task that wants one each millisecond, in seconds.

    Other processes on the machine do not count: `held` is processor time of the loop's thread, and
    `stalled` that of the whole process, so with a thread that keeps the interpreter's lock. A slow
    machine does not count, either: once the block has ended, both are what a usual one had taken.
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
    """Watch the loop while a block runs. The block should do its work in other threads."""
    probe, slowness = Probe(), _slowness()
    gc.collect()
    gc.freeze()  # as the command does: exempts existing objects from collection
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(probe.run)
            await trio.sleep(0.01)
            yield probe
            nursery.cancel_scope.cancel()
    finally:
        gc.unfreeze()
        slowness = max(slowness, _slowness())
        probe.held /= slowness
        probe.stalled /= slowness


def _slowness() -> float:
    """How much slower this machine is now than usual, as a factor of at least 1."""
    began = time.thread_time()
    sum(i * i for i in range(200_000))
    return max(1.0, (time.thread_time() - began) / _USUAL)
