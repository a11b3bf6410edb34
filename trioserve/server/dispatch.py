"""From the engine's outbox to the requests: one mailbox a request, with a bound.

A bridge wakes the event loop from the inference thread. A task whose reader leaves its mailbox to
fill up is paused, and cancelled where the mailbox stays full for too long. Neither needs the reader
to be awake.
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
    """A doorbell. Rings that come before it is answered count as one."""

    def notify(self) -> None:
        """Ring. From any thread; never blocks."""

    async def wait(self) -> None:
        """Wait until it rings, and answer.

        When cancelled, a ring that has come is kept for the next call.
        """

    def close(self) -> None:
        """Give the descriptors back, on the event loop. Who waits gets a ClosedResourceError.

        A ring that comes later is lost.
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
        # Keeps the GIL, which `os.eventfd_write` would give to the event loop just when the
        # inference thread wants to go on to `llama_decode`, which gives it up anyway.
        self._write(self._fd, 1)

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._fd)
        os.eventfd_read(self._fd)

    def close(self) -> None:
        fd, self._fd = self._fd, -1  # a ring that comes too late is for no other file
        trio.lowlevel.notify_closing(fd)
        os.close(fd)


class SocketPairBridge:
    """A pair of sockets, where there is no eventfd (macOS, Windows)."""

    def __init__(self) -> None:
        try:
            self._reader, self._writer = socket.socketpair()
        except OSError as error:
            raise BridgeError(f"A socket pair could not be made: {error}") from error
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def notify(self) -> None:
        # When the buffer is full of rings, one more adds nothing; when it is closed, no ring does.
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
    """Make the best bridge that this system has.

    Raises:
        BridgeError: there are no descriptors left, or none may be made.
    """
    return EventFdBridge() if hasattr(os, "eventfd") else SocketPairBridge()


_T = TypeVar("_T")

#: Bytes in a mailbox above which its task is paused, however few tokens they belong to. One event
#: of a response has little more.
UNREAD_BYTES = 2**20

#: About what a candidate for a token takes, in memory and in a response; and a small event.
_CANDIDATE_BYTES = 150
_EVENT_BYTES = 150


def size_of(probs: Sequence[TokenProbs]) -> int:
    """Estimate the bytes that the candidates for some tokens take."""
    return _CANDIDATE_BYTES * sum([1 + len(one.top) for one in probs])


@attrs.define
class QueueLoad:
    """Requests that wait for a slot, and what their prompts add up to."""

    n_requests: int = 0
    n_tokens: int = 0


class Mailbox:
    """The unread events of one task. One reader."""

    def __init__(self, task_id: int, n_prompt: int, client: str = "") -> None:
        self.task_id = task_id
        self.n_prompt = n_prompt
        self.client = client
        self.queued = True  # the task has no slot
        self.n_unread = 0  # tokens
        self.n_bytes = 0  # that they take, roughly
        self.ended = False  # the engine has sent the last event, or was told to drop the task
        self.cancel_reason: CancelReason | None = None
        #: Called when the reader was found stalled, to wake it where Trio cannot.
        self.on_stalled: Callable[[], None] | None = None
        self._events: list[Event] = []
        # Output that came token by token since the last event; the reader gets it as one chunk.
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
        if not self._tokens and not self._events:  # else it is awake
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
        """Make the reader raise `error`, ahead of what it has not read."""
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
    """Sorts the engine's events into mailboxes, and watches over the readers.

    Args:
        engine: where events come from, and where pauses and cancels go.
        bridge: rings when there are events.
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
        # Paused mailboxes and when their time is up: the first one is always the next.
        self._paused: OrderedDict[Mailbox, float] = OrderedDict()
        self._someone_paused = trio.Event()
        self._deadlines: list[tuple[float, int]] = []  # a heap; ended tasks may still be in it
        self._new_deadline = trio.Event()
        self._calls: set[trio.Event] = set()  # that wait for the inference thread
        self._is_stopped = False
        #: Set when the engine has failed, and all requests have been told.
        self.failed = trio.Event()
        self.queued = QueueLoad()
        #: By client: those that are not empty.
        self._queued_of: defaultdict[str, QueueLoad] = defaultdict(QueueLoad)

    def __len__(self) -> int:
        return len(self._mailboxes)

    @property
    def mailboxes(self) -> Iterable[Mailbox]:
        """The mailboxes of all requests that are open."""
        return tuple(self._mailboxes.values())

    def queued_of(self, client: str) -> QueueLoad:
        """What a client has in the queue."""
        return self._queued_of.get(client) or QueueLoad()

    def open(
        self, task_id: int, n_prompt: int, *, client: str = "", deadline: float = math.inf
    ) -> Mailbox:
        """Make the mailbox of a task. Call it before the task is submitted.

        At the `deadline` (`trio.current_time`) the task is cancelled, wherever it is.
        """
        mailbox = Mailbox(task_id, n_prompt, client)
        if deadline < math.inf:
            heapq.heappush(self._deadlines, (deadline, task_id))
            self._new_deadline.set()
        self._mailboxes[task_id] = mailbox
        self._count(mailbox, 1)
        return mailbox

    def _move(self, mailbox: Mailbox, queued: bool) -> None:
        """Note that a request has gone back to the queue, or left it."""
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
        """Drop a mailbox, and cancel its task unless that has ended."""
        del self._mailboxes[mailbox.task_id]
        self._paused.pop(mailbox, None)
        self._move(mailbox, False)
        if not mailbox.ended:
            mailbox.ended = True
            self._engine.cancel(mailbox.task_id)

    def end(self, mailbox: Mailbox, error: TrioServeError, reason: CancelReason) -> None:
        """Cancel a task whose reader did not ask for it; the reader gets `error`."""
        if not mailbox.ended:
            mailbox.cancel_reason = reason
            mailbox.fail(error)
            self._engine.cancel(mailbox.task_id)

    async def take(self, mailbox: Mailbox) -> list[Event]:
        """Take the events of a mailbox, and let its task go on if it was paused."""
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
        """Call a function on the inference thread, between two steps; returns or raises as it does.

        When cancelled before it was called, it is not called any more. `post` hands it over; the
        default is the engine's `call`.

        Raises:
            EngineError: the engine failed before it came to the call.
            ServerClosingError: the engine was stopped before it came to the call.
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
        """Take no calls any more, and end those that wait: the engine is about to stop."""
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
        """Tell whoever still waits for the engine that it has failed."""
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
                continue  # cancelled while the event was on its way
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
        """Pause the task of a mailbox that is full."""
        if not mailbox.ended and mailbox not in self._paused:
            self._engine.pause(mailbox.task_id)
            self._paused[mailbox] = trio.current_time() + self._stall_timeout
            self._someone_paused.set()

    async def _watch_readers(self) -> None:
        """Cancel the tasks of readers that stay behind for too long."""
        while True:
            while not self._paused:
                self._someone_paused = trio.Event()
                await self._someone_paused.wait()
            mailbox, deadline = next(iter(self._paused.items()))
            await trio.sleep_until(deadline)
            if self._paused.get(mailbox) == deadline:
                self._give_up(mailbox)

    async def _watch_deadlines(self) -> None:
        """Cancel the tasks whose time is up. Their readers may be anywhere, or stuck."""
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
        if mailbox.on_stalled is not None:
            mailbox.on_stalled()
