"""`AgentRun`: what a caller holds of an answer with tools, and how its events get there."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import attrs
import trio
from trio_util import AsyncValue

from trioserve.errors import (
    RequestEndedError,
    ServerClosingError,
    ToolCallDecidedError,
    TrioServeError,
    UnknownToolCallError,
)
from trioserve.server.runs.events import RunAnswer, RunCall, RunEnded, RunEvent, ToolOutput
from trioserve.server.stream import ChatStream


@attrs.frozen
class Decision:
    """Whether a call may run, and why."""

    approved: bool
    reason: str = ""


@attrs.define(eq=False)
class _Call:
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    is_waiting: bool = False
    decided: trio.Event = attrs.field(factory=trio.Event)
    decision: Decision | None = None
    is_stopped: bool = False
    is_over: bool = False


class Decisions:
    """The calls of a run, by id, for those who approve them and stop them."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}

    def begin(self, call_id: str) -> trio.CancelScope:
        """Know a call from now on. Returns the scope to run it in."""
        self._calls[call_id] = call = _Call()
        return call.scope

    def end(self, call_id: str) -> None:
        """Note that a call is over."""
        self._calls[call_id].is_over = True

    def is_stopped(self, call_id: str) -> bool:
        """Whether somebody has stopped it."""
        return self._calls[call_id].is_stopped

    async def wait(self, call_id: str, timeout: float) -> Decision:
        """Wait until somebody decides about a call; after `timeout` seconds it is refused."""
        call = self._calls[call_id]
        call.is_waiting = True
        try:
            with trio.move_on_after(timeout):
                await call.decided.wait()
        finally:
            call.is_waiting = False
        return call.decision or Decision(False, f"nobody has decided within {timeout:g} seconds")

    def decide(self, call_id: str, *, approved: bool, reason: str = "") -> None:
        """Decide about a call that waits for that.

        Raises:
            UnknownToolCallError: there is no such call.
            ToolCallDecidedError: it does not wait, or not any more.
        """
        call = self._find(call_id)
        if not call.is_waiting or call.decision is not None:
            raise ToolCallDecidedError(
                f"The call {call_id!r} does not wait for approval.", param="call_id"
            )
        call.decision = Decision(approved, reason)
        call.decided.set()

    def stop(self, call_id: str) -> None:
        """Cancel a call. Raises as `decide`, if it is over."""
        call = self._find(call_id)
        if call.is_over or call.is_stopped:
            raise ToolCallDecidedError(f"The call {call_id!r} has ended already.", param="call_id")
        call.is_stopped = True
        call.scope.cancel()

    def _find(self, call_id: str) -> _Call:
        call = self._calls.get(call_id)
        if call is None:
            raise UnknownToolCallError(
                f"There is no call {call_id!r:.80} in this answer.", param="call_id"
            )
        return call


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


class AgentRun:
    """The events of a run, as they come. The last one is `RunEnded`.

    Iterate over it within the block that opened it. Cancelling an iteration loses nothing; leaving
    the block cancels the run, with its answer and its tools.

    Raises:
        TrioServeError: from the iteration, when the model fails, or the server ends the run. A tool
            that fails is no error here: the model is told.
    """

    def __init__(self) -> None:
        #: The whole of it, once the last event has been read.
        self.answer: RunAnswer | None = None
        #: The answer that the model is giving; None between two of them.
        self.stream: ChatStream | None = None
        #: Whether output comes at the pace at which it is to be shown.
        self.is_paced = True
        self.feed = Feed()
        self.decisions = Decisions()
        self.began = trio.Event()  # the first answer has begun, or could not
        self.scope = trio.CancelScope()
        self.error: TrioServeError | None = None  # why it was cancelled
        self._watchers: list[Callable[[ChatStream], object]] = []

    @property
    def is_over(self) -> bool:
        """Whether nothing runs any more. There may be events that nobody has read."""
        return self.feed.is_over

    def __aiter__(self) -> AsyncIterator[RunEvent]:
        return self

    async def __anext__(self) -> RunEvent:
        event = await self.feed.take()
        if isinstance(event, RunEnded):
            self.answer = event.answer
        return event

    async def read(self) -> RunAnswer:
        """Read all that is left, to the end. Raises what the iteration raises."""
        self.is_paced = False
        if self.stream is not None:
            self.stream.stream.is_paced = False
        async for _ in self:
            pass
        assert self.answer is not None
        return self.answer

    # -- for those who decide about its calls

    def approve(self, call_id: str, reason: str = "") -> None:
        """Let a call run that waits for this.

        Raises:
            UnknownToolCallError: there is no such call.
            ToolCallDecidedError: it does not wait, or not any more.
        """
        self.decisions.decide(call_id, approved=True, reason=reason)

    def deny(self, call_id: str, reason: str = "") -> None:
        """Refuse a call that waits for approval; the model is told why. Raises as `approve`."""
        self.decisions.decide(call_id, approved=False, reason=reason)

    def stop(self, call_id: str) -> None:
        """End a call, whatever it does; the model is told. Raises as `approve`."""
        self.decisions.stop(call_id)

    def cancel(self, error: TrioServeError | None = None) -> None:
        """End the run from another task; its reader gets an error, by default that it was."""
        if self.error is None:
            self.error = error or RequestEndedError("The request was cancelled.")
        self.scope.cancel()

    # -- for those who watch over it

    def watch(self, function: Callable[[ChatStream], object]) -> None:
        """Have a function called with each answer when it begins, and with the one that has."""
        self._watchers.append(function)
        if self.stream is not None:
            function(self.stream)

    @contextmanager
    def watched(self, stream: ChatStream) -> Iterator[None]:
        """Note the answer that the model is giving, for as long as a block lasts."""
        self.stream = stream
        stream.stream.is_paced = self.is_paced
        try:
            for watcher in self._watchers:
                watcher(stream)
            yield
        finally:
            self.stream = None


class Runs:
    """The runs that are going on."""

    def __init__(self) -> None:
        self._runs: set[AgentRun] = set()
        self._n_open = AsyncValue(0)

    @contextmanager
    def hold(self, run: AgentRun) -> Iterator[None]:
        """Know a run for as long as a block lasts."""
        self._runs.add(run)
        self._n_open.value = len(self._runs)
        try:
            yield
        finally:
            self._runs.remove(run)
            self._n_open.value = len(self._runs)

    async def wait_none(self) -> None:
        """Wait until no run goes on."""
        await self._n_open.wait_value(0)

    def end_all(self, message: str) -> None:
        """End all runs; their readers get a ServerClosingError."""
        for run in self._runs:
            run.cancel(ServerClosingError(message))
