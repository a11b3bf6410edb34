"""`AgentRun`: the caller's object for an answer with tools, and the queue of its events."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import attrs
import trio

from trioserve.errors import (
    RequestEndedError,
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
    """The running calls of a run by id, with decisions about them."""

    def __init__(self) -> None:
        self._calls: dict[str, _Call] = {}

    def begin(self, call_id: str) -> trio.CancelScope:
        """Register a call. Returns the scope to run it in."""
        self._calls[call_id] = call = _Call()
        return call.scope

    def end(self, call_id: str) -> None:
        """Remove a call that has ended."""
        self._calls[call_id].is_over = True

    def is_stopped(self, call_id: str) -> bool:
        """Whether a call was stopped."""
        return self._calls[call_id].is_stopped

    async def wait(self, call_id: str, timeout: float) -> Decision:
        """Wait for a decision about a call; refuse it after `timeout` seconds."""
        call = self._calls[call_id]
        call.is_waiting = True
        try:
            with trio.move_on_after(timeout):
                await call.decided.wait()
        finally:
            call.is_waiting = False
        return call.decision or Decision(False, f"no decision was made within {timeout:g} seconds")

    def decide(self, call_id: str, *, approved: bool, reason: str = "") -> None:
        """Decide about a call that waits for approval.

        Raises:
            UnknownToolCallError: the call does not exist.
            ToolCallDecidedError: the call does not wait for a decision.
        """
        call = self._find(call_id)
        if not call.is_waiting or call.decision is not None:
            raise ToolCallDecidedError(
                f"The call {call_id!r} does not wait for approval.", param="call_id"
            )
        call.decision = Decision(approved, reason)
        call.decided.set()

    def stop(self, call_id: str) -> None:
        """Cancel a call. Raises as `decide` if it has ended."""
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


#: Unread events above which the model waits.
_MAX_EVENTS = 16

#: The most characters of unread tool output. More output is dropped.
_MAX_OUTPUT = 2**20

_NOT_SHOWN = "\n[some output is not shown: it was not read in time]\n"


class Feed:
    """A queue of events. Number each event with `new_id` right before putting it."""

    def __init__(self) -> None:
        self._events: deque[RunEvent] = deque()
        self._n_ids = 0
        self._n_output = 0  # characters of tool output in the queue
        self._is_cut = False
        #: Whether the last event was put.
        self.is_over = False
        self._error: BaseException | None = None
        self._reader = trio.lowlevel.ParkingLot()
        self._writers = trio.lowlevel.ParkingLot()

    def new_id(self) -> int:
        """The number of the next event."""
        self._n_ids += 1
        return self._n_ids

    def put(self, event: RunEvent) -> None:
        """Add an event."""
        self._events.append(event)
        self._reader.unpark()

    def put_output(self, call: RunCall, text: str) -> None:
        """Add tool output, or drop it if too much is unread."""
        if self._n_output + len(text) > _MAX_OUTPUT:
            if self._is_cut:
                return
            self._is_cut, text = True, _NOT_SHOWN
        self._n_output += len(text)
        self.put(ToolOutput(self.new_id(), call, text))

    def end(self, error: BaseException | None = None) -> None:
        """End the queue, with an error for the reader or without."""
        self.is_over, self._error = True, error
        self._reader.unpark_all()

    def check_begun(self) -> None:
        """Raise the error if it is the next thing to read."""
        if self._error is not None and not self._events:
            raise self._error

    async def wait_room(self) -> None:
        """Wait until the reader has made room. A checkpoint."""
        if len(self._events) < _MAX_EVENTS:
            await trio.lowlevel.checkpoint()
        while len(self._events) >= _MAX_EVENTS:
            await self._writers.park()

    async def take(self) -> RunEvent:
        """Wait for the next event and take it. Cancelling it loses no events.

        Raises:
            StopAsyncIteration: there are no more events.
            BaseException: the error that `end` was called with.
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
    """The events of a run, as they arrive. The last one is `RunEnded`.

    Iterate over it within the block that opened it. Cancelling an iteration loses no events;
    leaving the block cancels the run, with its answer and its tools.

    Raises:
        TrioServeError: from the iteration, when the model fails or the server ends the run. The
            error of a tool is not raised: it is a result for the model.
    """

    def __init__(self) -> None:
        #: The result, once the last event has been read.
        self.answer: RunAnswer | None = None
        #: The current answer of the model; None between answers.
        self.stream: ChatStream | None = None
        #: Whether chunks wait until they are due.
        self.is_paced = True
        self.feed = Feed()
        self.decisions = Decisions()
        self.began = trio.Event()  # the first answer has started or failed
        self.scope = trio.CancelScope()
        self.error: TrioServeError | None = None  # the reason of a cancellation
        self._watchers: list[Callable[[ChatStream], object]] = []

    @property
    def is_over(self) -> bool:
        """Whether the run has ended. Unread events may remain."""
        return self.feed.is_over

    def __aiter__(self) -> AsyncIterator[RunEvent]:
        return self

    async def __anext__(self) -> RunEvent:
        event = await self.feed.take()
        if isinstance(event, RunEnded):
            self.answer = event.answer
        return event

    async def read(self) -> RunAnswer:
        """Read to the end. Raises what the iteration raises."""
        self.is_paced = False
        if self.stream is not None:
            self.stream.stream.is_paced = False
        async for _ in self:
            pass
        assert self.answer is not None
        return self.answer

    # -- decisions about its calls

    def approve(self, call_id: str, reason: str = "") -> None:
        """Allow a call that waits for approval.

        Raises:
            UnknownToolCallError: the call does not exist.
            ToolCallDecidedError: the call does not wait for a decision.
        """
        self.decisions.decide(call_id, approved=True, reason=reason)

    def deny(self, call_id: str, reason: str = "") -> None:
        """Refuse a call that waits for approval; the model gets the reason. Raises as `approve`."""
        self.decisions.decide(call_id, approved=False, reason=reason)

    def stop(self, call_id: str) -> None:
        """End a call in any state; the model gets an error result. Raises as `approve`."""
        self.decisions.stop(call_id)

    def cancel(self, error: TrioServeError | None = None) -> None:
        """End the run from another task; its reader gets `error` or a `RequestEndedError`."""
        if self.error is None:
            self.error = error or RequestEndedError("The request was cancelled.")
        self.scope.cancel()

    # -- monitoring

    def watch(self, function: Callable[[ChatStream], object]) -> None:
        """Register a function to call with the stream of the current and each later answer."""
        self._watchers.append(function)
        if self.stream is not None:
            function(self.stream)

    @contextmanager
    def watched(self, stream: ChatStream) -> Iterator[None]:
        """Set the current answer during a block."""
        self.stream = stream
        stream.stream.is_paced = self.is_paced
        try:
            for watcher in self._watchers:
                watcher(stream)
            yield
        finally:
            self.stream = None
