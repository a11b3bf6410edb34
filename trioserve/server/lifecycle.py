"""The engine of a server, and the two threads beside the event loop.

One of them loads the model, the other runs the engine.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import trio

from trioserve.config import Config
from trioserve.engine import (
    MAX_IDLE,
    AnswersFirst,
    AnyBackend,
    BatchStrategy,
    CheckpointRules,
    EmbeddingBackend,
    EmbeddingEngine,
    Engine,
    load_strategy,
)
from trioserve.engine.loop import Loop
from trioserve.errors import ModelLoadError
from trioserve.models.fetch import fetch
from trioserve.server.bridge import open_bridge
from trioserve.server.dispatch import Dispatcher
from trioserve.server.drafters import ngram_drafters


class Loader(Protocol):
    """Loads a model; `trioserve.llama.load` is one. Runs in a worker thread, and may block it.

    It calls `progress` with the share that is loaded (0.0 to 1.0), and gives up with a
    `ModelLoadError` when that returns False.
    """

    def __call__(
        self, config: Config, *, progress: Callable[[float], bool] | None = None
    ) -> AnyBackend:
        """Load what the configuration names."""


#: Runs an engine for as long as a block lasts.
Driver = Callable[[Loop], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def running_engine(
    config: Config, load: Loader, drive: Driver, on_progress: Callable[[float], None]
) -> AsyncIterator[tuple[Loop, Dispatcher]]:
    """Load a model and run its engine as long as a block lasts. It is downloaded, if it must be.

    Raises:
        HubError: from the download.
        ModelLoadError: from the loader.
        ConfigError: there is no such strategy.
        BridgeError: the system has no descriptors left.
    """
    config = await fetch(config)
    strategy = load_strategy(config.strategy, config.max_tick_ms)
    if not config.cont_batching:
        strategy = AnswersFirst(strategy)
    bridge = open_bridge()
    try:
        backend = await load_backend(load, config, on_progress)
        loop = _make_loop(config, backend, strategy, bridge.notify)
        dispatcher = Dispatcher(
            loop,
            bridge,
            unread_tokens=config.unread_tokens,
            stall_timeout=config.stall_timeout,
        )
        async with drive(loop):
            yield loop, dispatcher
    finally:
        bridge.close()


def _make_loop(
    config: Config, backend: AnyBackend, strategy: BatchStrategy, notify: Callable[[], None]
) -> Loop:
    if isinstance(backend, EmbeddingBackend):
        return EmbeddingEngine(backend, notify)
    engine = Engine(
        backend,
        strategy,
        notify,
        cache_ram=config.cache_ram * 2**20,
        max_idle=MAX_IDLE if config.cache_idle_slots else None,
        checkpoints=CheckpointRules(
            per_slot=config.ctx_checkpoints, step=config.checkpoint_min_step
        ),
        context_shift=config.context_shift,
        flush_interval=config.stream_interval_ms / 1e3,
    )
    if engine.encoder is not None:
        engine.encoder.limit = config.media_cache * 2**20
    engine.drafts.use([*ngram_drafters(config), *backend.drafters])
    return engine


@asynccontextmanager
async def in_thread(engine: Loop) -> AsyncIterator[None]:
    """Run an engine on a thread of its own; stop and join it at the end, cancelled or not.

    The engine stops after the step that runs, and closes its backend on its own thread.
    """
    thread = threading.Thread(target=engine.run, name="trioserve-engine", daemon=True)
    thread.start()
    try:
        yield
    finally:
        engine.stop()
        with trio.CancelScope(shield=True):
            await trio.to_thread.run_sync(thread.join)


async def load_backend(
    load: Loader, config: Config, on_progress: Callable[[float], None]
) -> AnyBackend:
    """Load a model in a worker thread.

    When cancelled, the loader is told to give up, and what it may have loaded is freed.

    Raises:
        ModelLoadError: from the loader.
    """
    given_up = threading.Event()
    loaded: list[AnyBackend] = []
    failures: list[ModelLoadError] = []

    def progress(share: float) -> bool:
        on_progress(share)
        return not given_up.is_set()

    def work() -> None:
        try:
            loaded.append(load(config, progress=progress))
        except ModelLoadError as error:
            failures.append(error)  # raised by the caller, outside of the nursery's group

    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_set_when_cancelled, given_up)
            await trio.to_thread.run_sync(work)
            nursery.cancel_scope.cancel()
    except BaseException:
        with trio.CancelScope(shield=True):
            for backend in loaded:
                await trio.to_thread.run_sync(backend.close)
        raise
    if failures:
        raise failures[0]
    return loaded[0]


async def _set_when_cancelled(event: threading.Event) -> None:
    try:
        await trio.sleep_forever()
    finally:
        event.set()
