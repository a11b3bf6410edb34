"""`Feed`: the events of a run, on their way from its tasks to its reader."""

from __future__ import annotations

from collections import deque

import trio

from trioserve.server.runs.events import RunCall, RunEvent, ToolOutput

#: So many events may wait before the model has to.
_MAX_EVENTS = 16

#: Characters of the output of tools that may wait. More is not shown.
_MAX_OUTPUT = 2**20

_NOT_SHOWN = "\n[some output is not shown: it was not read in time]\n"


class Feed:
    """A queue of events. Whoever puts one in numbers it at the same time, with `new_id`."""

    def __init__(self) -> None:
        self._events: deque[RunEvent] = deque()
        self._n_ids = 0
        self._n_output = 0  # characters of output in it
        self._is_cut = False
        #: Whether no more events come.
        self.is_over = False
        self._error: BaseException | None = None
        self._reader = trio.lowlevel.ParkingLot()
        self._writers = trio.lowlevel.ParkingLot()

    def new_id(self) -> int:
        """Number an event."""
        self._n_ids += 1
        return self._n_ids

    def put(self, event: RunEvent) -> None:
        """Add an event."""
        self._events.append(event)
        self._reader.unpark()

    def put_output(self, call: RunCall, text: str) -> None:
        """Add output of a tool, unless there is too much that nobody has read."""
        if self._n_output + len(text) > _MAX_OUTPUT:
            if self._is_cut:
                return
            self._is_cut, text = True, _NOT_SHOWN
        self._n_output += len(text)
        self.put(ToolOutput(self.new_id(), call, text))

    def end(self, error: BaseException | None = None) -> None:
        """Have the reader raise an error behind the last event, or end."""
        self.is_over, self._error = True, error
        self._reader.unpark_all()

    def check_begun(self) -> None:
        """Raise the error that is the first thing to read, if it is."""
        if self._error is not None and not self._events:
            raise self._error

    async def wait_room(self) -> None:
        """Wait until the reader has read enough. A checkpoint."""
        if len(self._events) < _MAX_EVENTS:
            await trio.lowlevel.checkpoint()
        while len(self._events) >= _MAX_EVENTS:
            await self._writers.park()

    async def take(self) -> RunEvent:
        """Wait for the next event, and take it. Cancelling it loses nothing.

        Raises:
            StopAsyncIteration: there is none any more.
            BaseException: what `end` was called with.
        """
        if self._events or self.is_over:
            await trio.lowlevel.checkpoint()
        while not self._events:
            if self._error is not None:
                raise self._error
            if self.is_over:
                raise StopAsyncIteration
            await self._reader.park()
        event = self._events.popleft()
        if isinstance(event, ToolOutput):
            self._n_output -= len(event.text)
            self._is_cut = False
        self._writers.unpark_all()
        return event
