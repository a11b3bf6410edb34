"""Whether a request is let in: how many may wait, and for how long."""

from __future__ import annotations

import math

from trioserve.config import Config
from trioserve.errors import QueueFullError, ServerClosingError
from trioserve.server.dispatch import Dispatcher

#: Share of a new observation in the average of how long requests take.
_WEIGHT = 0.2


class Admission:
    """Refuses requests that would wait in a queue that is full, and estimates waits.

    Args:
        config: the limits.
        dispatcher: knows how many requests run and wait.
        n_slots: requests that run at the same time.
    """

    def __init__(self, config: Config, dispatcher: Dispatcher, n_slots: int) -> None:
        self._max_queue = config.max_queue
        self._max_queue_tokens = config.max_queue_tokens
        self._dispatcher = dispatcher
        self._n_slots = n_slots
        self._service_s = 0.0  # how long a request holds its slot, a moving average
        self.draining = False  # nothing new is let in
        self.closed = False  # and what has begun is over

    def check_open(self) -> None:
        """Refuse whatever comes when the server drains or is closed.

        Raises:
            ServerClosingError: it does, or is.
        """
        if self.draining or self.closed:
            raise ServerClosingError

    def check(self, n_prompt: int) -> None:
        """Let a request in, or raise.

        Raises:
            QueueFullError: too many requests wait, or too many tokens; says when to come back.
        """
        n_queued = self._dispatcher.n_queued
        n_free = self._n_slots - (len(self._dispatcher) - n_queued)
        if n_queued < n_free:
            return  # it does not wait
        if n_queued - n_free >= self._max_queue:
            raise QueueFullError(
                f"{n_queued} requests are waiting, and the limit is {self._max_queue}.",
                retry_after=self._retry_after(),
            )
        n_tokens = self._dispatcher.n_queued_tokens + n_prompt
        if self._max_queue_tokens and n_tokens > self._max_queue_tokens:
            raise QueueFullError(
                f"With this request, {n_tokens} prompt tokens would be waiting, "
                f"and the limit is {self._max_queue_tokens}.",
                retry_after=self._retry_after(),
            )

    def observe(self, service_ms: float) -> None:
        """Learn how long a request has held its slot."""
        seconds = service_ms / 1e3
        weight = _WEIGHT if self._service_s else 1.0
        self._service_s += weight * (seconds - self._service_s)

    def wait_s(self, position: int) -> float | None:
        """Estimate how long the request at a position waits; 1 is the next one.

        So many requests have to end first, as many at a time as there are slots. Returns None
        while none has ended, so that nothing is known.
        """
        return position / self._n_slots * self._service_s if self._service_s else None

    def _retry_after(self) -> float:
        """Say when a place in the queue will be free: when one request is done."""
        return max(1.0, math.ceil(self._service_s / self._n_slots))
