"""`AgentRun`: the caller's object for an answer with tools, and the queue of its events."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import attrs
import trio

from trioserve.concurrency import Feed
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
    """The decision about a call, and its reason."""

    approved: bool
    reason: str = ""


@attrs.define(eq=False)
class _Call:
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    asked: Feed[Decision] | None = None  # open while the call waits for a decision
    is_over: bool = False


#: Unread events above which the model waits.
_MAX_EVENTS = 16

#: The most characters of unread tool output. More output is dropped.
_MAX_OUTPUT = 2**20

_NOT_SHOWN = "\n[some output is not shown: it was not read in time]\n"


class AgentRun(Feed[RunEvent]):
    """The events of a run, as they arrive. The last one is `RunEnded`.

    Iterate over it within the block that opened it. Cancelling an iteration loses no events;
    leaving the block cancels the run, with its answer and its tools.

    Raises:
        TrioServeError: from the iteration, when the model fails or the server ends the run. The
            error of a tool is not raised: it is a result for the model.
    """

    def __init__(self) -> None:
        super().__init__(_MAX_EVENTS)
        #: The result, once the last event has been read.
        self.answer: RunAnswer | None = None
        #: The current answer of the model; None between answers.
        self.stream: ChatStream | None = None
        #: True if chunks wait until they are due.
        self.is_paced = True
        self.scope = trio.CancelScope()
        self._calls: dict[str, _Call] = {}
        self._watchers: list[Callable[[ChatStream], object]] = []
        self._ids = itertools.count(1)
        self._n_output = 0  # unread characters of tool output
        self._is_cut = False

    # -- its events

    def new_id(self) -> int:
        """The number of the next event. Take it right before putting the event."""
        return next(self._ids)

    def put_output(self, call: RunCall, text: str) -> None:
        """Add tool output, or drop it if too much is unread."""
        if self._n_output + len(text) > _MAX_OUTPUT:
            if self._is_cut:
                return
            self._is_cut, text = True, _NOT_SHOWN
        self._n_output += len(text)
        self.put(ToolOutput(self.new_id(), call, text))

    async def __anext__(self) -> RunEvent:
        event = await super().__anext__()
        if isinstance(event, ToolOutput):
            self._n_output -= len(event.text)
            self._is_cut = False
        elif isinstance(event, RunEnded):
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

    @contextmanager
    def running(self, call_id: str) -> Iterator[trio.CancelScope]:
        """Run a call in the block. `stop` cancels the block's scope."""
        self._calls[call_id] = call = _Call()
        try:
            with call.scope as scope:
                yield scope
        finally:
            call.is_over = True

    async def decision(self, call_id: str, timeout: float) -> Decision:
        """Wait for a decision about a call; refuse it after `timeout` seconds."""
        self._calls[call_id].asked = asked = Feed[Decision]()
        try:
            with trio.move_on_after(timeout):
                await asked.wait()
        finally:
            asked.end()
        refusal = Decision(False, f"no decision was made within {timeout:g} seconds")
        return await anext(asked, refusal)

    def approve(self, call_id: str, reason: str = "") -> None:
        """Allow a call that waits for approval.

        Raises:
            UnknownToolCallError: the call does not exist.
            ToolCallDecidedError: the call does not wait for a decision.
        """
        self._decide(call_id, Decision(True, reason))

    def deny(self, call_id: str, reason: str = "") -> None:
        """Refuse a call that waits for approval; the model gets the reason. Raises as `approve`."""
        self._decide(call_id, Decision(False, reason))

    def _decide(self, call_id: str, decision: Decision) -> None:
        asked = self._find(call_id).asked
        if asked is None or asked.is_over:
            raise ToolCallDecidedError(
                f"The call {call_id!r} does not wait for approval.", param="call_id"
            )
        asked.put(decision)
        asked.end()

    def stop(self, call_id: str) -> None:
        """End a call in any state; the model gets an error result. Raises as `approve`."""
        call = self._find(call_id)
        if call.is_over or call.scope.cancel_called:
            raise ToolCallDecidedError(f"The call {call_id!r} has ended already.", param="call_id")
        call.scope.cancel()

    def _find(self, call_id: str) -> _Call:
        call = self._calls.get(call_id)
        if call is None:
            raise UnknownToolCallError(
                f"There is no call {call_id!r:.80} in this answer.", param="call_id"
            )
        return call

    def cancel(self, error: TrioServeError | None = None) -> None:
        """End the run from another task; its reader gets `error` or a `RequestEndedError`."""
        self.end(error or RequestEndedError("The request was cancelled."))
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
