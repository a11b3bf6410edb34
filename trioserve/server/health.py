"""Looks at a running server: what its slots do, and whether its engine is alive."""

from __future__ import annotations

from time import monotonic

import attrs
import trio

from trioserve.engine.loop import Loop
from trioserve.errors import ServerClosingError, UnavailableError
from trioserve.server.admission import Admission
from trioserve.server.dispatch import Dispatcher
from trioserve.types import EngineStatus

#: Seconds in which an engine that does nothing answers, on a busy machine too.
_ANSWER_TIMEOUT = 5.0


class Health:
    """Looks at an engine from the event loop."""

    def __init__(self, loop: Loop, dispatcher: Dispatcher, admission: Admission) -> None:
        self._loop = loop
        self._dispatcher = dispatcher
        self._admission = admission

    async def status(self) -> EngineStatus:
        """See `Server.status`."""
        if self._admission.closed:
            raise ServerClosingError
        status = await self._dispatcher.call(self._loop.status)
        wait_s = self._admission.wait_s
        waiting = (attrs.evolve(one, wait_s=wait_s(one.position)) for one in status.waiting)
        return attrs.evolve(status, waiting=tuple(waiting))

    async def check_live(self, tick_timeout: float) -> None:
        """Look whether the engine works: it ticks, or it has nothing to do and answers.

        Args:
            tick_timeout: seconds that one tick may take.

        Raises:
            UnavailableError: it does not.
            ServerClosingError: the server is closed.
        """
        if self._loop.failure is not None:
            raise UnavailableError(self._loop.failure.message)
        if monotonic() - self._loop.heartbeat < tick_timeout:
            return
        # The last tick began long ago. It still runs, or was followed by a rest.
        with trio.move_on_after(_ANSWER_TIMEOUT) as scope:
            await self.status()
        if scope.cancelled_caught:
            raise UnavailableError(f"The engine has not ticked for {tick_timeout:g} seconds.")

    def check_queue(self, client: str) -> None:
        """Look whether there is room for one more request of a client, without holding it.

        Raises:
            QueueFullError: too many requests wait already.
            ServerClosingError: the server drains, or is closed.
        """
        self._admission.check_open()
        self._admission.check(0, client)
