"""Runs an engine on the event loop, where a test controls time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from trioserve.engine.loop import Loop
from trioserve.server.concurrency import alongside


@asynccontextmanager
async def ticking(engine: Loop) -> AsyncIterator[None]:
    """Tick an engine in a task, once a pass of the event loop. For ``Server(drive=ticking)``.

    With a `trio.testing.MockClock` that jumps, time passes only when nobody has work. A task
    that waits in `trio.testing.wait_all_tasks_blocked` sees all that can be done be done.
    """
    arrived = trio.Event()

    def ring() -> None:
        arrived.set()

    async def run() -> None:
        nonlocal arrived
        while True:
            if engine.tick():
                await trio.lowlevel.checkpoint()
            else:
                await arrived.wait()
                arrived = trio.Event()

    engine.inbox.listener = ring
    try:
        async with alongside(run):
            yield
    finally:
        engine.inbox.listener = None
        engine.stop()
        engine.run()  # takes the stop, and closes the backend
