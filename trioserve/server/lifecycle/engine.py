"""The engine of a server: loading, running and monitoring it in threads."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import attrs
import trio
from trio_util import AsyncValue

from trioserve.concurrency import run_in_worker
from trioserve.config import Config
from trioserve.engine import (
    MAX_IDLE,
    AnswersFirst,
    AnyBackend,
    Backend,
    BatchStrategy,
    CheckpointRules,
    DiskCache,
    Drafter,
    EmbeddingBackend,
    EmbeddingEngine,
    Engine,
    NgramDrafter,
    NgramRules,
    SpeechBackend,
    SpeechEngine,
    load_strategy,
)
from trioserve.engine.helpers import start
from trioserve.engine.loop import EngineLoop
from trioserve.errors import EngineError, ModelLoadError, UnavailableError
from trioserve.log import get_logger
from trioserve.models.fetch import fetch
from trioserve.server.dispatch import Dispatcher, open_bridge
from trioserve.server.generation.requests import Admission
from trioserve.types import EngineStatus


def ngram_drafters(config: Config) -> list[Drafter]:
    """Make the n-gram drafters, in the order of their use."""
    rules = {
        "ngram-simple": NgramRules(
            name="ngram-simple",
            n=config.spec_ngram_simple_size_n,
            n_max=config.spec_ngram_simple_size_m,
        ),
        "ngram-mod": NgramRules(
            name="ngram-mod",
            n=config.spec_ngram_mod_n_match,
            n_min=config.spec_ngram_mod_n_min,
            n_max=config.spec_ngram_mod_n_max,
            shared=True,
        ),
    }
    return [NgramDrafter(rules[name]) for name in config.draft_types if name in rules]


class Loader(Protocol):
    """Loads a model, like `trioserve.llama.load`. Runs in a worker thread, and may block it.

    It calls `progress` with the fraction loaded (0.0 to 1.0). When the load is cancelled, that
    raises `trio.Cancelled`; the loader frees what it has loaded.
    """

    def __call__(
        self, config: Config, *, progress: Callable[[float], bool] | None = None
    ) -> AnyBackend:
        """Load the configured model."""


#: Seconds to wait for the running step when the engine stops.
_JOIN_SECONDS = 60.0

_Backend = TypeVar("_Backend", bound=AnyBackend)

#: Runs an engine during a block.
Driver = Callable[[EngineLoop], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def running_engine(
    config: Config, load: Loader, drive: Driver, failure: AsyncValue[EngineError | None]
) -> AsyncIterator[tuple[EngineLoop, Dispatcher]]:
    """Load a model, after a download if needed, and run its engine during a block.

    Raises:
        HubError: the download failed.
        ModelLoadError: the loader failed.
        ConfigError: a configured strategy does not exist.
        BridgeError: no descriptors are left.
    """
    config = await fetch(config)
    strategy = load_strategy(config.strategy, config.max_tick_ms)
    if not config.cont_batching:
        strategy = AnswersFirst(strategy)
    make = partial(_make_loop, config, strategy)
    loading = partial(load, config, progress=_check_load)
    async with engine_of(config, loading, make, drive, failure) as running:
        yield running


@asynccontextmanager
async def engine_of(
    config: Config,
    load: Callable[[], _Backend],
    make: Callable[[_Backend, Callable[[], None]], EngineLoop],
    drive: Driver,
    failure: AsyncValue[EngineError | None],
) -> AsyncIterator[tuple[EngineLoop, Dispatcher]]:
    """Run the engine that is made of a backend during a block; `load` may block a thread.

    Raises as `load`, and:
        BridgeError: no descriptors are left.
    """
    async with AsyncExitStack() as stack:
        bridge = open_bridge()
        stack.callback(bridge.close)
        backend = await trio.to_thread.run_sync(load)
        async with AsyncExitStack() as owner:
            owner.push_async_callback(_close, backend)
            loop = make(backend, bridge.notify)
            dispatcher = Dispatcher(
                loop,
                bridge,
                unread_tokens=config.unread_tokens,
                stall_timeout=config.stall_timeout,
                failure=failure,
            )
            await stack.enter_async_context(drive(loop))
            owner.pop_all()  # the engine closes the backend from now on
        yield loop, dispatcher


def _make_loop(
    config: Config, strategy: BatchStrategy, backend: AnyBackend, notify: Callable[[], None]
) -> EngineLoop:
    if isinstance(backend, EmbeddingBackend):
        return EmbeddingEngine(backend, notify)
    if isinstance(backend, SpeechBackend):
        return SpeechEngine(backend, notify)
    cache_ram = config.cache_ram * 2**20
    if backend.spare_ram is not None:
        cache_ram = min(cache_ram, backend.spare_ram)
    engine = Engine(
        backend,
        strategy,
        notify,
        cache_ram=cache_ram,
        max_idle=MAX_IDLE if config.cache_idle_slots else None,
        checkpoints=CheckpointRules(
            per_slot=config.ctx_checkpoints, step=config.checkpoint_min_step
        ),
        disk=_disk_cache(config, backend),
        context_shift=config.context_shift,
    )
    engine.flush_interval = config.stream_interval_ms / 1e3
    if engine.encoder is not None:
        engine.encoder.limit = config.media_cache * 2**20
    engine.drafts.use([*ngram_drafters(config), *backend.drafters])
    return engine


def _disk_cache(config: Config, backend: Backend) -> DiskCache | None:
    if config.cache_disk is None:
        return None
    base = Path(config.cache_disk).expanduser()
    return DiskCache(
        base, config.cache_disk_size, backend.state_identity, cuttable=backend.cuttable
    )


#: See `Inbox.gather_s`. Eight requests that arrive together are parsed in this time.
_GATHER_SECONDS = 0.02


@asynccontextmanager
async def in_thread(engine: EngineLoop) -> AsyncIterator[None]:
    """Run an engine on a new thread; stop and join it at the end, even when cancelled.

    The engine stops after the current step, and closes its backend on its thread. A thread that
    hangs in a step is abandoned after a minute.

    Raises:
        ModelLoadError: the system refuses a thread.
    """
    thread = threading.Thread(target=engine.run, name="trioserve-engine", daemon=True)
    engine.inbox.gather_s = _GATHER_SECONDS
    try:
        engine.start_helpers()
        start(thread)
    except ModelLoadError:
        engine.end_helpers()
        raise
    try:
        yield
    finally:
        engine.stop()
        with trio.CancelScope(shield=True):
            # Not Trio's default limiter, which may be full: this join cannot be skipped.
            limiter = trio.CapacityLimiter(1)
            await run_in_worker(partial(thread.join, _JOIN_SECONDS), limiter)
        if thread.is_alive():
            _log.error("the inference thread does not end, and is left", seconds=_JOIN_SECONDS)


def _check_load(_share: float) -> bool:
    """Let a load continue, or end it when it is cancelled."""
    trio.from_thread.check_cancelled()
    return True


async def _close(backend: AnyBackend) -> None:
    """Free a backend that has no engine, even when cancelled."""
    with trio.CancelScope(shield=True):
        await run_in_worker(backend.close, trio.CapacityLimiter(1))


_log = get_logger("trioserve.server")

#: Seconds that a status request waits for the running step to end.
_ANSWER_TIMEOUT = 5.0


@attrs.define(eq=False, slots=False)
class Health:
    """Monitors an engine from the event loop."""

    _loop: EngineLoop  # the engine
    _dispatcher: Dispatcher  # submits calls to the engine
    _admission: Admission  # has the average wait of requests
    _timeout: float  # seconds that a step may take; 0: no limit

    def __attrs_post_init__(self) -> None:
        self._stuck = False  # the current step exceeds the watchdog timeout
        self._last = self._loop.status()  # the engine does not run yet, so any thread may read it

    async def run(self) -> None:
        """Request the engine's status regularly. It answers after the running step."""
        with contextlib.suppress(EngineError):  # the lifecycle reports it
            while True:
                with trio.move_on_after(self._timeout or math.inf) as scope:
                    await self._ask()
                if scope.cancelled_caught:
                    await self._wait_stuck()
                if not self._timeout:
                    return
                await trio.sleep(self._timeout / 8)

    async def _wait_stuck(self) -> None:
        """Wait until a step that exceeds the timeout ends."""
        began = trio.current_time() - self._timeout
        frame = sys._current_frames().get(self._loop.thread_id or 0)
        stack = "".join(traceback.format_stack(frame)) if frame is not None else ""
        _log.error("a step takes too long", seconds=self._timeout, stack=stack)
        self._stuck = True
        try:
            await self._ask()
        finally:
            self._stuck = False
        _log.warning("the long step has ended", seconds=round(trio.current_time() - began, 3))

    async def _ask(self) -> None:
        """Request the engine's status. Raises EngineError if the engine has failed."""
        self._last = await self._dispatcher.call(self._loop.status)

    async def status(self) -> EngineStatus:
        """See `Server.status`."""
        if not self._stuck:
            with trio.move_on_after(_ANSWER_TIMEOUT), contextlib.suppress(EngineError):
                await self._ask()
        wait_s = self._admission.wait_s
        waiting = (attrs.evolve(one, wait_s=wait_s(one.position)) for one in self._last.waiting)
        return attrs.evolve(self._last, waiting=tuple(waiting))

    def check(self) -> None:
        """Check that no step takes too long. Raises UnavailableError."""
        if self._stuck:
            raise UnavailableError(f"A step takes longer than {self._timeout:g} seconds.")
