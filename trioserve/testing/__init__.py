"""Helpers for tests of programs that use trioserve, such as a backend that follows a script.

`ScriptedBackend` takes the place of a model: no file, no llama.cpp, the same output each time.
`ScriptedProjector` gives it eyes and ears, and `ToolScript` has it call tools. `ScriptedSpeaker`
speaks, and `heard` reads what it has said.
`stepping` runs an engine on the event loop itself, so that a `trio.testing.MockClock` is in
charge of all the time there is.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import trio

from trioserve.concurrency import Bell, alongside
from trioserve.config import Config
from trioserve.engine import Engine
from trioserve.engine.backend import Backend
from trioserve.engine.loop import EngineLoop
from trioserve.testing.backend import ScriptedBackend
from trioserve.testing.projector import ScriptedProjector
from trioserve.testing.scripts import ToolScript
from trioserve.testing.speaker import ScriptedSpeaker, heard
from trioserve.testing.vocab import byte_vocab

__all__ = [
    "ScriptedBackend",
    "ScriptedProjector",
    "ScriptedSpeaker",
    "ToolScript",
    "byte_vocab",
    "heard",
    "scripted",
    "stepping",
]


def scripted(backend: Backend) -> Callable[..., Backend]:
    """Make a loader for `Server(load=...)` that loads this backend."""

    def load(config: Config, *, progress: Callable[[float], bool] | None = None) -> Backend:
        if progress is not None:
            progress(1.0)
        return backend

    return load


@asynccontextmanager
async def stepping(engine: EngineLoop) -> AsyncIterator[None]:
    """Step an engine in a task, once a pass of the event loop. For ``Server(drive=stepping)``.

    With an autojump `trio.testing.MockClock`, time passes only when the engine and all tasks are
    idle. When `trio.testing.wait_all_tasks_blocked` returns, the engine has done all it can.
    """
    arrived = Bell()
    encoder = engine.encoder if isinstance(engine, Engine) else None
    if encoder is not None:
        encoder.has_thread = False  # it has its turns here, too

    async def run() -> None:
        while True:
            if engine.step() or (encoder is not None and encoder.encode_next()):
                await trio.lowlevel.checkpoint()
            else:
                await arrived.wait()

    engine.inbox.listener = arrived.ring
    try:
        async with alongside(run):
            yield
    finally:
        engine.inbox.listener = None
        engine.stop()
        engine.run()  # takes the stop, and closes the backend
