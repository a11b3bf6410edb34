"""Looks at a running server: what its slots do, and whether its engine is alive."""

from __future__ import annotations

import contextlib
import math
import sys
import traceback

import attrs
import structlog
import trio

from trioserve.engine.loop import Loop
from trioserve.errors import EngineError, ServerClosingError, UnavailableError
from trioserve.server.admission import Admission
from trioserve.server.dispatch import Dispatcher
from trioserve.types import EngineStatus

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
        self, loop: Loop, dispatcher: Dispatcher, admission: Admission, watchdog_timeout: float
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
