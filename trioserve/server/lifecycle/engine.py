"""The engine of a server: loaded and run in threads beside the event loop, and watched over."""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from typing import Protocol

import attrs
import structlog
import trio

from trioserve.config import Config
from trioserve.engine import (
    MAX_IDLE,
    AnswersFirst,
    AnyBackend,
    BatchStrategy,
    CheckpointRules,
    Drafter,
    EmbeddingBackend,
    EmbeddingEngine,
    Engine,
    NgramDrafter,
    NgramRules,
    load_strategy,
)
from trioserve.engine.loop import EngineLoop
from trioserve.errors import EngineError, ModelLoadError, ServerClosingError, UnavailableError
from trioserve.models.fetch import fetch
from trioserve.server.dispatch import Dispatcher, open_bridge
from trioserve.server.limits.admission import Admission
from trioserve.types import EngineStatus


def ngram_drafters(config: Config) -> list[Drafter]:
    """Make the drafters that guess from n-grams, in the order in which they are to be asked."""
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
    """Loads a model; `trioserve.llama.load` is one. Runs in a worker thread, and may block it.

    It calls `progress` with the share that is loaded (0.0 to 1.0), and gives up with a
    `ModelLoadError` when that returns False.
    """

    def __call__(
        self, config: Config, *, progress: Callable[[float], bool] | None = None
    ) -> AnyBackend:
        """Load what the configuration names."""


#: Seconds that a step may take to end, when the engine is to stop.
_JOIN_SECONDS = 60.0

#: Runs an engine for as long as a block lasts.
Driver = Callable[[EngineLoop], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def running_engine(
    config: Config, load: Loader, drive: Driver, on_progress: Callable[[float], None]
) -> AsyncIterator[tuple[EngineLoop, Dispatcher]]:
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
    async with AsyncExitStack() as stack:
        bridge = open_bridge()
        stack.callback(bridge.close)
        backend = await load_backend(load, config, on_progress)
        async with AsyncExitStack() as owner:
            owner.push_async_callback(_close, backend)
            loop = _make_loop(config, backend, strategy, bridge.notify)
            dispatcher = Dispatcher(
                loop,
                bridge,
                unread_tokens=config.unread_tokens,
                stall_timeout=config.stall_timeout,
            )
            await stack.enter_async_context(drive(loop))
            owner.pop_all()  # from here on, the engine closes the backend
        stack.callback(dispatcher.end_calls)
        yield loop, dispatcher


def _make_loop(
    config: Config, backend: AnyBackend, strategy: BatchStrategy, notify: Callable[[], None]
) -> EngineLoop:
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
async def in_thread(engine: EngineLoop) -> AsyncIterator[None]:
    """Run an engine on a thread of its own; stop and join it at the end, cancelled or not.

    The engine stops after the step that runs, and closes its backend on its own thread. A thread
    that hangs in a step is left after a minute.
    """
    thread = threading.Thread(target=engine.run, name="trioserve-engine", daemon=True)
    thread.start()
    try:
        yield
    finally:
        engine.stop()
        with trio.CancelScope(shield=True):
            # A thread of its own: this cannot be given up, and all others may be taken.
            limiter = trio.CapacityLimiter(1)
            await trio.to_thread.run_sync(thread.join, _JOIN_SECONDS, limiter=limiter)
        if thread.is_alive():
            _log.error("the inference thread does not end, and is left", seconds=_JOIN_SECONDS)


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
        for backend in loaded:
            await _close(backend)
        raise
    if failures:
        raise failures[0]
    return loaded[0]


async def _close(backend: AnyBackend) -> None:
    """Free a backend that no engine has, cancelled or not."""
    with trio.CancelScope(shield=True):
        await trio.to_thread.run_sync(backend.close, limiter=trio.CapacityLimiter(1))


async def _set_when_cancelled(event: threading.Event) -> None:
    try:
        await trio.sleep_forever()
    finally:
        event.set()


_log = structlog.stdlib.get_logger("trioserve.server")

#: Seconds that somebody who asks for the status waits for the running step to end.
_ANSWER_TIMEOUT = 5.0


class Health:
    """Looks at an engine from the event loop.

    Args:
        loop: the engine.
        dispatcher: brings calls to it, and learns of its failure.
        admission: knows how long requests wait.
        watchdog_timeout: seconds that a step may take; 0: any number.
    """

    def __init__(
        self,
        loop: EngineLoop,
        dispatcher: Dispatcher,
        admission: Admission,
        watchdog_timeout: float,
    ) -> None:
        self._loop = loop
        self._dispatcher = dispatcher
        self._admission = admission
        self._timeout = watchdog_timeout
        self._stuck = False  # a step takes longer than that
        self._last = loop.status()  # nothing runs yet, so that any thread may look

    async def run(self) -> None:
        """Watch the engine until cancelled, and log what is wrong with it."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_steps)
            failure = await self.wait_failure()
            _log.error("the engine has failed", exc_info=failure.__cause__)

    async def wait_failure(self) -> EngineError:
        """Wait until the engine has failed; returns with what. Its requests have been told."""
        await self._dispatcher.failed.wait()
        assert self._loop.failure is not None
        return self._loop.failure

    async def _watch_steps(self) -> None:
        """Ask the engine for its status now and then. It answers when the running step ends."""
        with contextlib.suppress(EngineError):  # which `run` reports
            while True:
                with trio.move_on_after(self._timeout or math.inf) as scope:
                    await self._ask()
                if scope.cancelled_caught:
                    await self._wait_stuck()
                if not self._timeout:
                    return
                await trio.sleep(self._timeout / 8)

    async def _wait_stuck(self) -> None:
        """Wait until a step ends that has taken too long."""
        began = trio.current_time() - self._timeout
        _log.error("a step takes too long", seconds=self._timeout, stack=self._stack())
        self._stuck = True
        try:
            await self._ask()
        finally:
            self._stuck = False
        _log.warning("the long step has ended", seconds=round(trio.current_time() - began, 3))

    def _stack(self) -> str:
        """Where the inference thread is."""
        frame = sys._current_frames().get(self._loop.thread_id or 0)
        return "".join(traceback.format_stack(frame)) if frame is not None else ""

    async def _ask(self) -> None:
        """Get the status from the engine. Raises EngineError if that has failed."""
        self._last = await self._dispatcher.call(self._loop.status)

    async def status(self) -> EngineStatus:
        """See `Server.status`."""
        if self._admission.closed:
            raise ServerClosingError
        if not self._stuck:
            with trio.move_on_after(_ANSWER_TIMEOUT), contextlib.suppress(EngineError):
                await self._ask()
        wait_s = self._admission.wait_s
        waiting = (attrs.evolve(one, wait_s=wait_s(one.position)) for one in self._last.waiting)
        return attrs.evolve(self._last, waiting=tuple(waiting))

    def check_ready(self) -> None:
        """Look whether requests are taken.

        Raises:
            UnavailableError: the engine has failed.
            ServerClosingError: the server drains, or is closed.
        """
        if self._loop.failure is not None:
            raise UnavailableError(self._loop.failure.message)
        self._admission.check_open()

    def check_live(self) -> None:
        """Look whether the engine works.

        Raises:
            UnavailableError: it has failed, or a step takes too long.
        """
        if self._loop.failure is not None:
            raise UnavailableError(self._loop.failure.message)
        if self._stuck:
            raise UnavailableError(f"A step takes longer than {self._timeout:g} seconds.")
