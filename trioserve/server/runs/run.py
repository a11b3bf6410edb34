"""`Run`: what a caller holds of an answer for which tools are run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager

import trio

from trioserve.errors import RequestEndedError, TrioServeError
from trioserve.server.runs.decisions import Decisions
from trioserve.server.runs.events import RunAnswer, RunEnded, RunEvent
from trioserve.server.runs.feed import Feed
from trioserve.server.stream import ChatStream


class Run:
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
