"""Runs an engine on the event loop, where a test controls time."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from trioserve.engine import Engine
from trioserve.engine.loop import EngineLoop
from trioserve.server.concurrency import alongside


@asynccontextmanager
async def stepping(engine: EngineLoop) -> AsyncIterator[None]:
    """Step an engine in a task, once a pass of the event loop. For ``Server(drive=stepping)``.

    With a `trio.testing.MockClock` that jumps, time passes only when nobody has work. A task
    that waits in `trio.testing.wait_all_tasks_blocked` sees all that can be done be done.
    """
    arrived = trio.Event()

    def ring() -> None:
        arrived.set()

    encoder = engine.encoder if isinstance(engine, Engine) else None
    if encoder is not None:
        encoder.has_thread = False  # it has its turns here, too

    async def run() -> None:
        nonlocal arrived
        while True:
            if engine.step() or (encoder is not None and encoder.encode_next()):
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
