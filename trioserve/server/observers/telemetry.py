"""`Telemetry`: passes events of the engine and of requests to callbacks, in batches."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeAlias

import attrs
import trio

from trioserve.concurrency import alongside
from trioserve.engine.loop import EngineLoop
from trioserve.errors import InvalidRequestError
from trioserve.log import get_logger
from trioserve.server.observers.observer import Event, Observer, RequestRecord, RequestStarted
from trioserve.tools.functions import is_async
from trioserve.types import StepRecord

_log = get_logger("trioserve.telemetry")

#: The most undelivered steps, and the most other events, for a callback. The oldest are dropped.
MAX_KEPT = 4096


@attrs.frozen(kw_only=True)
class TelemetryBatch:
    """The events since the last batch: the steps, oldest first, and then all others."""

    #: Records of steps, requests, tool calls and recordings.
    events: tuple[Event, ...]
    #: The number of events dropped because the callback was too slow.
    n_lost: int

    @property
    def steps(self) -> tuple[StepRecord, ...]:
        """The steps of the engine, oldest first."""
        return tuple(event for event in self.events if isinstance(event, StepRecord))

    @property
    def requests(self) -> tuple[RequestRecord, ...]:
        """The requests that have ended, oldest first, without their prompts."""
        return tuple(event for event in self.events if isinstance(event, RequestRecord))


#: An async function, or a plain one, which is called in a worker thread.
Callback: TypeAlias = Callable[[TelemetryBatch], Awaitable[None]] | Callable[[TelemetryBatch], None]


@attrs.define(eq=False, slots=False)
class Telemetry:
    """Passes events to subscribed callbacks. It costs nothing without a subscription."""

    #: Of the server. `Telemetry` is one of them while there are subscriptions.
    _observers: list[Observer]
    _subscriptions: list[_Subscription] = attrs.field(init=False, factory=list)
    _loop: EngineLoop | None = attrs.field(init=False, default=None)
    _n_records: int = attrs.field(init=False, default=0)  # of earlier engines

    def attach(self, loop: EngineLoop | None) -> None:
        """Switch to the steps of another engine, or of none while the server sleeps."""
        self._n_records = self._next_index - 1
        self._loop = loop
        if loop is not None:
            loop.n_records = self._n_records
        self._watch()

    @property
    def _next_index(self) -> int:
        """The index of the next step record, or of the one in progress."""
        return 1 + (self._n_records if self._loop is None else self._loop.n_records)

    @asynccontextmanager
    async def subscribe(self, callback: Callback, *, interval: float = 0.25) -> AsyncIterator[None]:
        """Call a function with batches of events during a block.

        Calls do not overlap. Each follows `interval` seconds after the last one, if there are
        events. A last call follows when the block ends without an exception. A slow call delays
        only the next ones; events dropped meanwhile are counted in `n_lost`. Exceptions from a call
        are logged.

        Args:
            callback: an async function, or a plain one, which is called in a worker thread.
            interval: seconds between two calls.

        Raises:
            InvalidRequestError: the interval is not positive.
        """
        if not interval > 0:
            raise InvalidRequestError.at("interval", "must be more than 0.")
        subscription = _Subscription(callback, interval)
        self._subscriptions.append(subscription)
        self._watch()
        subscription.next_index = self._next_index
        try:
            async with alongside(subscription.run):
                yield
                await subscription.deliver()
        finally:
            self._subscriptions.remove(subscription)
            self._watch()

    def _watch(self) -> None:
        """Request events from the engine and the server only while there are subscriptions."""
        if self._loop is not None:
            self._loop.watchers = tuple(one.steps for one in self._subscriptions)
        if self in self._observers:
            self._observers.remove(self)
        if self._subscriptions:
            self._observers.append(self)

    def on_event(self, event: Event) -> None:
        """Queue an event for the next batch."""
        if isinstance(event, RequestStarted):
            return
        if isinstance(event, RequestRecord):
            request = attrs.evolve(event.request, task=None, prompt_text=None)
            event = RequestRecord(request, event.end)
        for one in self._subscriptions:
            one.put(event)


class _Subscription:
    """The undelivered events of one callback."""

    def __init__(self, callback: Callback, interval: float) -> None:
        #: The engine's thread appends, and the event loop pops from the left.
        self.steps: deque[StepRecord] = deque(maxlen=MAX_KEPT)
        self._others: deque[Event] = deque(maxlen=MAX_KEPT)
        self._callback = callback
        self._interval = interval
        self._thread = trio.CapacityLimiter(1)  # a blocking callback delays no other
        self._n_lost = 0
        self.next_index = 1  # of the next step
        self._one = trio.Lock()  # calls do not overlap

    def put(self, event: Event) -> None:
        self._n_lost += len(self._others) == MAX_KEPT
        self._others.append(event)

    async def run(self) -> None:
        while True:
            await trio.sleep(self._interval)
            await self.deliver()

    async def deliver(self) -> None:
        """Call the function, after the current call, if there are events."""
        async with self._one:
            if (batch := self._take()).events:
                await self._call(batch)

    async def _call(self, batch: TelemetryBatch) -> None:
        try:
            if is_async(self._callback):
                await self._callback(batch)  # type: ignore[misc]
            else:
                await trio.to_thread.run_sync(self._callback, batch, limiter=self._thread)
        except Exception:
            _log.exception("a telemetry callback has failed")

    def _take(self) -> TelemetryBatch:
        steps = [self.steps.popleft() for _ in range(len(self.steps))]
        others = [*self._others]
        self._others.clear()
        if steps:
            n_made = steps[-1].index + 1 - self.next_index
            self._n_lost += max(0, n_made - len(steps))
            self.next_index = steps[-1].index + 1
        n_lost, self._n_lost = self._n_lost, 0
        return TelemetryBatch(events=(*steps, *others), n_lost=n_lost)
