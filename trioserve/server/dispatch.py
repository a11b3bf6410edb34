"""Dispatches the engine's events to requests, with one bounded mailbox for each request.

A bridge wakes the event loop from the inference thread. A task is paused when its reader lets the
mailbox fill up, and cancelled when the mailbox stays full for too long. Both work while the reader
is blocked.
"""

from __future__ import annotations

import contextlib
import ctypes
import heapq
import math
import os
import socket
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeVar

import attrs
import outcome
import trio

from trioserve.engine.loop import EngineLoop
from trioserve.errors import (
    BridgeError,
    DeadlineExceededError,
    ServerClosingError,
    StalledReaderError,
    TrioServeError,
)
from trioserve.types import (
    Admitted,
    CancelReason,
    Chunk,
    Chunks,
    EngineEvent,
    Event,
    Failed,
    Finished,
    Preempted,
    Progress,
    TokenId,
    TokenProbs,
)


class Bridge(Protocol):
    """Wakes the event loop. Notifications before the loop answers are combined into one."""

    def notify(self) -> None:
        """Notify the event loop. Callable from any thread; never blocks."""

    async def wait(self) -> None:
        """Wait for a notification, and clear it.

        When cancelled, a pending notification is kept for the next call.
        """

    def close(self) -> None:
        """Close the descriptors, on the event loop. A waiting task gets a ClosedResourceError.

        Later notifications are ignored.
        """


class EventFdBridge:
    """An eventfd (Linux): a counter in the kernel, one descriptor."""

    def __init__(self) -> None:
        try:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            raise BridgeError(f"An eventfd could not be made: {error}") from error
        self._write = ctypes.PyDLL(None).eventfd_write
        self._write.argtypes = [ctypes.c_int, ctypes.c_uint64]

    def notify(self) -> None:
        # This write keeps the GIL. `os.eventfd_write` would release it to the event loop just
        # before the inference thread calls `llama_decode`, which releases it anyway.
        self._write(self._fd, 1)

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._fd)
        os.eventfd_read(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1  # a late write must not reach a reused descriptor
        trio.lowlevel.notify_closing(fd)
        os.close(fd)


class SocketPairBridge:
    """A pair of sockets, for systems without eventfd (macOS, Windows)."""

    def __init__(self) -> None:
        try:
            self._reader, self._writer = socket.socketpair()
        except OSError as error:
            raise BridgeError(f"A socket pair could not be made: {error}") from error
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def notify(self) -> None:
        # A full buffer already wakes the loop; a closed socket needs no wake-up.
        with contextlib.suppress(OSError):
            self._writer.send(b"\0")

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._reader)
        self._reader.recv(65536)

    def close(self) -> None:
        trio.lowlevel.notify_closing(self._reader)
        self._reader.close()
        self._writer.close()


def open_bridge() -> Bridge:
    """Open the best bridge that this system supports.

    Raises:
        BridgeError: no descriptors are left, or the system forbids new ones.
    """
    return EventFdBridge() if hasattr(os, "eventfd") else SocketPairBridge()


_T = TypeVar("_T")

#: Bytes in a mailbox above which its task is paused, for any number of tokens. An event of a
#: response has little more.
UNREAD_BYTES = 2**20

#: Approximate bytes of a candidate token in memory and in a response; also of a small event.
_CANDIDATE_BYTES = 150
_EVENT_BYTES = 150


def size_of(probs: Sequence[TokenProbs]) -> int:
    """Estimate the bytes that the candidates for some tokens take."""
    return _CANDIDATE_BYTES * sum([1 + len(one.top) for one in probs])


@attrs.define
class QueueLoad:
    """Requests in the queue, and the sum of their prompt tokens."""

    n_requests: int = 0
    n_tokens: int = 0


class Mailbox:
    """The unread events of one task, for one reader."""

    def __init__(self, task_id: int, n_prompt: int, client: str = "") -> None:
        self.task_id = task_id
        self.n_prompt = n_prompt
        self.client = client
        self.queued = True  # the task has no slot
        self.n_unread = 0  # unread tokens
        self.n_bytes = 0  # approximate bytes of the unread events
        self.ended = False  # the engine sent the last event, or got a request to drop the task
        self.cancel_reason: CancelReason | None = None
        self._events: list[Event] = []
        # Single tokens since the last event; the reader gets them as one chunk.
        self._texts: list[str] = []
        self._tokens: list[TokenId] = []
        self._error: TrioServeError | None = None
        self._reader = trio.lowlevel.ParkingLot()

    @property
    def is_empty(self) -> bool:
        """Whether `take` would wait."""
        return not self._events and not self._tokens and self._error is None

    def put_token(self, text: str, token: TokenId) -> None:
        """Add one token of output and wake the reader."""
        self.n_unread += 1
        self.n_bytes += len(text)
        if not self._tokens and not self._events:  # otherwise the reader is awake
            self._reader.unpark()
        self._texts.append(text)
        self._tokens.append(token)

    def put_chunk(self, chunk: Chunk) -> None:
        """Add output and wake the reader."""
        self.n_unread += len(chunk.tokens)
        self.n_bytes += len(chunk.text)
        if chunk.probs:
            self.n_bytes += size_of(chunk.probs)
        self._add(chunk)

    def put(self, event: Progress | Finished | Failed) -> None:
        """Add another event and wake the reader."""
        self.n_bytes += _EVENT_BYTES
        if not isinstance(event, Progress):
            self.ended = True
        self._add(event)

    def _add(self, event: Event) -> None:
        self._join_tokens()
        self._events.append(event)
        self._reader.unpark()

    def _join_tokens(self) -> None:
        if self._tokens:
            chunk = Chunk(self.task_id, "".join(self._texts), tuple(self._tokens))
            self._texts, self._tokens = [], []
            self._events.append(chunk)

    def fail(self, error: TrioServeError) -> None:
        """Make the reader raise `error` before it reads pending events."""
        self._error = error
        self.ended = True
        self._reader.unpark()

    async def take(self) -> list[Event]:
        """Wait until there are events, and take them all. Nothing is lost when cancelled.

        Raises:
            TrioServeError: what `fail` was called with.
            BusyResourceError: another task waits here.
        """
        if not self.is_empty:
            await trio.lowlevel.checkpoint()
        while self.is_empty:
            if self._reader:
                raise trio.BusyResourceError("another task reads this request")
            await self._reader.park()
        if self._error is not None:
            raise self._error
        self._join_tokens()
        events, self._events = self._events, []
        self.n_unread = self.n_bytes = 0
        return events


class Dispatcher:
    """Dispatches the engine's events to mailboxes, and watches for stalled readers.

    Args:
        engine: sends events; pauses and cancels tasks.
        bridge: wakes the event loop when there are events.
        unread_tokens: tokens in a mailbox above which its task is paused.
        stall_timeout: seconds that a task may stay paused.
    """

    def __init__(
        self, engine: EngineLoop, bridge: Bridge, *, unread_tokens: int, stall_timeout: float
    ) -> None:
        self._engine = engine
        self._bridge = bridge
        self._unread_tokens = unread_tokens
        self._stall_timeout = stall_timeout
        self._mailboxes: dict[int, Mailbox] = {}
        # Paused mailboxes and when their time is up, in order of time.
        self._paused: OrderedDict[Mailbox, float] = OrderedDict()
        self._someone_paused = trio.Event()
        self._deadlines: list[tuple[float, int]] = []  # a heap; ended tasks may still be in it
        self._new_deadline = trio.Event()
        self._calls: set[trio.Event] = set()  # calls that wait for the inference thread
        self._is_stopped = False
        #: Set when the engine has failed, after all requests got the error.
        self.failed = trio.Event()
        self.queued = QueueLoad()
        #: Queue loads by client; empty ones are removed.
        self._queued_of: defaultdict[str, QueueLoad] = defaultdict(QueueLoad)

    def __len__(self) -> int:
        return len(self._mailboxes)

    @property
    def mailboxes(self) -> Iterable[Mailbox]:
        """The mailboxes of all open requests."""
        return tuple(self._mailboxes.values())

    def queued_of(self, client: str) -> QueueLoad:
        """The requests and tokens that a client has in the queue."""
        return self._queued_of.get(client) or QueueLoad()

    def open(
        self, task_id: int, n_prompt: int, *, client: str = "", deadline: float = math.inf
    ) -> Mailbox:
        """Make the mailbox of a task. Call it before the task is submitted.

        At the `deadline` (`trio.current_time`) the task is cancelled in any state.
        """
        mailbox = Mailbox(task_id, n_prompt, client)
        if deadline < math.inf:
            heapq.heappush(self._deadlines, (deadline, task_id))
            self._new_deadline.set()
        self._mailboxes[task_id] = mailbox
        self._count(mailbox, 1)
        return mailbox

    def _move(self, mailbox: Mailbox, queued: bool) -> None:
        """Update the queue loads when a request enters or leaves the queue."""
        if mailbox.queued != queued:
            mailbox.queued = queued
            self._count(mailbox, 1 if queued else -1)

    def _count(self, mailbox: Mailbox, n: int) -> None:
        own = self._queued_of[mailbox.client]
        for load in (self.queued, own):
            load.n_requests += n
            load.n_tokens += n * mailbox.n_prompt
        if not own.n_requests:
            del self._queued_of[mailbox.client]

    def close(self, mailbox: Mailbox) -> None:
        """Drop a mailbox, and cancel its task unless it has ended."""
        del self._mailboxes[mailbox.task_id]
        self._paused.pop(mailbox, None)
        self._move(mailbox, False)
        if not mailbox.ended:
            mailbox.ended = True
            self._engine.cancel(mailbox.task_id)

    def end(self, mailbox: Mailbox, error: TrioServeError, reason: CancelReason) -> None:
        """Cancel a task on the server's side; the reader gets `error`."""
        if not mailbox.ended:
            mailbox.cancel_reason = reason
            mailbox.fail(error)
            self._engine.cancel(mailbox.task_id)

    async def take(self, mailbox: Mailbox) -> list[Event]:
        """Take the events of a mailbox, and resume its task if it was paused."""
        events = await mailbox.take()
        if self._paused.pop(mailbox, None) is not None:
            self._engine.resume(mailbox.task_id)
        return events

    async def call(
        self,
        function: Callable[[], _T],
        *,
        post: Callable[[Callable[[], None]], None] | None = None,
    ) -> _T:
        """Call a function on the inference thread between two steps, and return its result.

        When cancelled before the call starts, the function is not called. `post` submits the call;
        the default is the engine's `call`.

        Raises:
            EngineError: the engine failed before the call.
            ServerClosingError: the engine stopped before the call.
        """
        done = trio.Event()
        token = trio.lowlevel.current_trio_token()
        results: list[outcome.Outcome[_T]] = []
        is_awaited = True

        def work() -> None:
            if is_awaited:
                results.append(outcome.capture(function))
                token.run_sync_soon(done.set)

        self._engine.check_works()
        if self._is_stopped:
            raise ServerClosingError
        (post or self._engine.call)(work)
        self._calls.add(done)
        try:
            await done.wait()
        finally:
            is_awaited = False
            self._calls.remove(done)
        if not results:
            self._engine.check_works()
            raise ServerClosingError
        return results[0].unwrap()

    def end_calls(self) -> None:
        """Reject new calls and end waiting ones, because the engine is about to stop."""
        self._is_stopped = True
        for call in self._calls:
            call.set()

    async def run(self) -> None:
        """Dispatch until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._watch_readers)
            nursery.start_soon(self._watch_deadlines)
            while True:
                await self._bridge.wait()
                self._dispatch(self._engine.take())
                if self._engine.failure is not None and not self.failed.is_set():
                    self._fail(self._engine.failure)

    def _fail(self, error: TrioServeError) -> None:
        """Report the engine's failure to all requests and calls that wait for it."""
        for mailbox in self._mailboxes.values():
            if not mailbox.ended:
                mailbox.fail(error.again())
        for call in self._calls:
            call.set()
        self.failed.set()

    def _dispatch(self, events: list[EngineEvent | Chunks]) -> None:
        for event in events:
            if isinstance(event, Chunks):
                if event.pace:
                    self._dispatch(list(event))
                else:
                    self._dispatch_tokens(event)
                continue
            mailbox = self._mailboxes.get(event.task_id)
            if mailbox is None or mailbox.ended:
                continue  # cancelled after the engine sent the event
            if isinstance(event, Chunk):
                mailbox.put_chunk(event)
            elif isinstance(event, Admitted | Preempted):
                self._move(mailbox, isinstance(event, Preempted))
                continue
            else:
                mailbox.put(event)
            if mailbox.n_unread >= self._unread_tokens or mailbox.n_bytes >= UNREAD_BYTES:
                self._pause(mailbox)

    def _dispatch_tokens(self, chunks: Chunks) -> None:
        columns = zip(chunks.task_ids, chunks.texts, chunks.tokens, strict=True)
        for task_id, text, token in columns:
            mailbox = self._mailboxes.get(task_id)
            if mailbox is not None and not mailbox.ended:
                mailbox.put_token(text, token)
                if mailbox.n_unread >= self._unread_tokens or mailbox.n_bytes >= UNREAD_BYTES:
                    self._pause(mailbox)

    def _pause(self, mailbox: Mailbox) -> None:
        """Pause the task of a full mailbox."""
        if not mailbox.ended and mailbox not in self._paused:
            self._engine.pause(mailbox.task_id)
            self._paused[mailbox] = trio.current_time() + self._stall_timeout
            self._someone_paused.set()

    async def _watch_readers(self) -> None:
        """Cancel the tasks of readers that stay stalled for too long."""
        while True:
            while not self._paused:
                self._someone_paused = trio.Event()
                await self._someone_paused.wait()
            mailbox, deadline = next(iter(self._paused.items()))
            await trio.sleep_until(deadline)
            if self._paused.get(mailbox) == deadline:
                self._give_up(mailbox)

    async def _watch_deadlines(self) -> None:
        """Cancel tasks at their deadlines. This works while their readers are blocked."""
        while True:
            next_one = self._deadlines[0][0] if self._deadlines else math.inf
            with trio.move_on_at(next_one):
                await self._new_deadline.wait()
                self._new_deadline = trio.Event()
            while self._deadlines and self._deadlines[0][0] <= trio.current_time():
                _, task_id = heapq.heappop(self._deadlines)
                mailbox = self._mailboxes.get(task_id)
                if mailbox is not None:
                    error = DeadlineExceededError()
                    self.end(mailbox, error, CancelReason.DEADLINE)

    def _give_up(self, mailbox: Mailbox) -> None:
        del self._paused[mailbox]
        error = StalledReaderError(
            f"{mailbox.n_unread} tokens were left unread for {self._stall_timeout:g} seconds."
        )
        self.end(mailbox, error, CancelReason.STALLED)
