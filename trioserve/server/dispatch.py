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
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Protocol, TypeVar

import attrs
import outcome
import trio
from trio_util import AsyncValue

from trioserve.concurrency import TURN, Bell, Feed, Gate
from trioserve.engine.loop import EngineLoop
from trioserve.errors import (
    BridgeError,
    DeadlineExceededError,
    EngineError,
    StalledReaderError,
    TrioServeError,
)
from trioserve.log import get_logger
from trioserve.types import (
    Admitted,
    AnyTask,
    CancelReason,
    Chunk,
    Chunks,
    EngineEvent,
    Event,
    Preempted,
    Progress,
    Returned,
    Sound,
    TokenId,
    TokenProbs,
)

_log = get_logger("trioserve.server")


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


class RunSyncSoonBridge:
    """Trio's own wake-up from a thread, for systems without eventfd (macOS, Windows)."""

    def __init__(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._bell = Bell()
        self._is_closed = False

    def notify(self) -> None:
        with contextlib.suppress(trio.RunFinishedError):  # a thread that was left behind
            self._token.run_sync_soon(self._bell.ring, idempotent=True)

    async def wait(self) -> None:
        await self._bell.wait()
        if self._is_closed:
            raise trio.ClosedResourceError

    def close(self) -> None:
        self._is_closed = True
        self._bell.ring()


def open_bridge() -> Bridge:
    """Open the best bridge that this system supports.

    Raises:
        BridgeError: no descriptors are left, or the system forbids new ones.
    """
    return EventFdBridge() if hasattr(os, "eventfd") else RunSyncSoonBridge()


_T = TypeVar("_T")

#: Bytes in a mailbox above which its task is paused, for any number of tokens. An event of a
#: response has little more.
UNREAD_BYTES = 2**20

#: Approximate bytes of a candidate token in memory and in a response; also of a small event.
CANDIDATE_BYTES = 150
_EVENT_BYTES = 150


def size_of(probs: Sequence[TokenProbs]) -> int:
    """Estimate the bytes that the candidates for some tokens take."""
    return CANDIDATE_BYTES * sum([1 + len(one.top) for one in probs])


#: Stands for the single tokens of a mailbox among its events.
_TOKENS = Chunk(0, "", ())


@attrs.define
class QueueLoad:
    """Requests in the queue, and the sum of their prompt tokens."""

    n_requests: int = 0
    n_tokens: int = 0


class Mailbox(Feed[Event]):
    """The unread events of one task. Its reader waits, and then takes all of them."""

    def __init__(self, task_id: int, n_prompt: int, client: str = "") -> None:
        super().__init__()
        self.task_id = task_id
        self.n_prompt = n_prompt
        self.client = client
        self.queued = True  # the task has no slot
        self.had_slot = False  # it has one now, or had one before it was preempted
        #: Called before its first slot counts. Raises TrioServeError if it is not to run any more.
        self.check_slot: Callable[[], object] | None = None
        self.n_output = 0  # tokens generated, or frames of sound, read or not
        self.n_samples = 1  # of sound in a frame
        self.n_unread = 0  # unread tokens
        self.n_bytes = 0  # approximate bytes of the unread events
        self.deadline = math.inf
        #: When the dispatcher looks at the reader of a paused task again; infinity: not paused.
        self.paused_until = math.inf
        self.patience = 0.0  # seconds after that until the reader is given up
        self.cancel_reason: CancelReason | None = None
        #: Called when the task gets a slot or loses it.
        self.on_move: Callable[[], object] = lambda: None
        # Single tokens since the last event; the reader gets them as one chunk.
        self._texts: list[str] = []
        self._tokens: list[TokenId] = []

    @property
    def is_empty(self) -> bool:
        """True if `wait` would block."""
        return not self._items and not self.is_over

    def put_token(self, text: str, token: TokenId) -> None:
        """Add one token of output and wake the reader."""
        self.n_output += 1
        self.n_unread += 1
        self.n_bytes += len(text)
        if not self._tokens:  # otherwise the reader is awake
            self._items.append(_TOKENS)
            if self._reader is not None:
                self._wake()
        self._texts.append(text)
        self._tokens.append(token)

    def put(self, event: Event) -> None:
        """Add an event and wake the reader. The last event ends the mailbox."""
        if self._tokens:
            self._join_tokens()
        super().put(event)
        if isinstance(event, Chunk):
            self.n_output += len(event.tokens)
            self.n_unread += len(event.tokens)
            self.n_bytes += len(event.text)
            if event.probs:
                self.n_bytes += size_of(event.probs)
            return
        self.n_bytes += _EVENT_BYTES
        if isinstance(event, Sound):
            self.n_output += len(event.samples) // self.n_samples
            self.n_bytes += event.samples.nbytes
        elif not isinstance(event, Progress):
            self.end()

    def _join_tokens(self) -> None:
        if self._items:  # else `end` has dropped them
            self._items[-1] = Chunk(self.task_id, "".join(self._texts), tuple(self._tokens))
        self._texts, self._tokens = [], []

    def take_all(self) -> list[Event]:
        """Take all unread events. Raises TrioServeError: the error of `end`."""
        if self._error is not None:
            self.check()
        if self._tokens:
            self._join_tokens()
        events = list(self._items)
        self._items.clear()
        self.n_unread = self.n_bytes = 0
        return events


@attrs.define(eq=False)
class _Settling(trio.abc.Instrument):
    """Tells an engine, once, that the event loop goes to sleep."""

    _engine: EngineLoop

    def before_io_wait(self, timeout: float) -> None:
        if timeout > 0:
            trio.lowlevel.remove_instrument(self)
            self._engine.inbox.settle()


#: Times beside those of open requests that may wait in `Dispatcher`.
_MANY_TIMES = 1000


@attrs.define(eq=False, slots=False)
class Dispatcher:
    """Dispatches the engine's events to mailboxes, and watches for stalled readers."""

    _engine: EngineLoop  # sends events; pauses and cancels tasks
    _bridge: Bridge  # wakes the event loop when there are events
    _unread_tokens: int  # in a mailbox above which its task is paused
    _stall_timeout: float  # seconds that a task may stay paused
    #: Set when the engine has failed, once all requests and calls have the error.
    _failure: AsyncValue[EngineError | None]

    def __attrs_post_init__(self) -> None:
        self._mailboxes: dict[int, Mailbox] = {}
        #: A heap of times and tasks: deadlines, and when readers are given up. Some are outdated.
        self._times: list[tuple[float, int]] = []
        self._most_times = _MANY_TIMES
        self._new_time = Bell()
        self._calls = Gate()  # calls that wait for the inference thread
        self._settling = _Settling(self._engine)
        #: Calls what puts the events of a step into the mailboxes.
        self.step: Callable[[Callable[[], None]], None] = lambda deliver: deliver()
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

    def used_by(self, client: str) -> int:
        """The tokens of a client's open requests: prompts that have had a slot, and outputs."""
        own = (each for each in self._mailboxes.values() if each.client == client)
        return sum(each.n_prompt + each.n_output for each in own if each.had_slot)

    def open(
        self, task_id: int, n_prompt: int, *, client: str = "", deadline: float = math.inf
    ) -> Mailbox:
        """Make the mailbox of a task. Call it before the task is submitted.

        At the `deadline` (`trio.current_time`) the task is cancelled in any state.
        """
        self._mailboxes[task_id] = mailbox = Mailbox(task_id, n_prompt, client)
        if deadline < math.inf:
            mailbox.deadline = deadline
            self._watch_at(deadline, mailbox)
        self._count(mailbox, 1)
        return mailbox

    def submit(self, task: AnyTask) -> None:
        """Give the engine a task. If it is idle, it begins when the event loop goes to sleep: tasks
        that arrive together are computed together.
        """
        self._engine.submit(task)
        if not self._engine.inbox.is_settled:
            trio.lowlevel.add_instrument(self._settling)

    def _move(self, mailbox: Mailbox, queued: bool) -> None:
        """Update the queue loads when a request enters or leaves the queue."""
        if mailbox.queued != queued:
            mailbox.queued = queued
            mailbox.on_move()
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
        self._move(mailbox, False)
        if not mailbox.is_over:
            mailbox.end()
            self._engine.cancel(mailbox.task_id)

    def end(self, mailbox: Mailbox, error: TrioServeError, reason: CancelReason) -> None:
        """Cancel a task on the server's side; the reader gets `error`."""
        if not mailbox.is_over:
            mailbox.cancel_reason = reason
            mailbox.end(error, now=True)
            self._engine.cancel(mailbox.task_id)

    def resume(self, mailbox: Mailbox) -> None:
        """Resume the task of a mailbox whose events were taken, if it was paused."""
        if mailbox.paused_until < math.inf:
            mailbox.paused_until = math.inf
            self._engine.resume(mailbox.task_id)

    async def call(self, function: Callable[[], _T], *, slot_id: int | None = None) -> _T:
        """Call a function on the inference thread, and return its result; see `EngineLoop.call`.

        When cancelled before the call starts, the function is not called.

        Raises:
            InvalidRequestError: there is no such slot.
            EngineError: the engine failed before the call.
            ServerClosingError: the engine stopped before the call.
        """
        result: Feed[outcome.Outcome[_T]] = Feed()

        def work() -> outcome.Outcome[_T] | None:
            return None if result.is_over else outcome.capture(function)

        try:
            with self._calls.open(result.end):
                self._engine.call(work, result.put, slot_id=slot_id)
                return (await anext(result)).unwrap()
        finally:
            result.end()

    async def run(self) -> None:
        """Dispatch until cancelled. No call waits any longer then."""
        try:
            while True:
                await self._bridge.wait()
                self.step(partial(self._dispatch, self._engine.take()))
                if self._engine.failure is not None:
                    self._report(self._engine.failure)
        finally:
            self._calls.end()

    def _report(self, failure: EngineError) -> None:
        """Report a failure of the engine to all requests and calls that wait for it."""
        for mailbox in self._mailboxes.values():
            mailbox.end(failure.again(), now=True)
        self._calls.end(failure)
        if self._failure.value is None:
            _log.error("the engine has failed", exc_info=failure.__cause__)
            self._failure.value = failure

    def _dispatch(self, events: Iterable[EngineEvent | Chunks]) -> None:
        for event in events:
            if isinstance(event, Chunks):
                if event.pace:
                    self._dispatch(event)
                else:
                    self._dispatch_tokens(event)
                continue
            mailbox = self._mailboxes.get(event.task_id)
            if isinstance(event, Returned):
                event.reply(event.value)
            elif mailbox is None or mailbox.is_over:
                continue  # cancelled after the engine sent the event
            elif isinstance(event, Admitted):
                self._admit(mailbox)
            elif isinstance(event, Preempted):
                self._move(mailbox, True)
            else:
                mailbox.put(event)
                if mailbox.n_unread >= self._unread_tokens or mailbox.n_bytes >= UNREAD_BYTES:
                    self._pause(mailbox)

    def _admit(self, mailbox: Mailbox) -> None:
        """Note that a task has a slot, or cancel it if it is not to run any more."""
        if mailbox.check_slot is not None and not mailbox.had_slot:
            try:
                mailbox.check_slot()
            except TrioServeError as error:
                mailbox.end(error, now=True)
                self._engine.cancel(mailbox.task_id)
                return
        mailbox.had_slot = True
        self._move(mailbox, False)

    def _dispatch_tokens(self, chunks: Chunks) -> None:
        columns = zip(chunks.task_ids, chunks.texts, chunks.tokens, strict=True)
        for task_id, text, token in columns:
            mailbox = self._mailboxes.get(task_id)
            if mailbox is not None and not mailbox.is_over:
                mailbox.put_token(text, token)
                if mailbox.n_unread >= self._unread_tokens or mailbox.n_bytes >= UNREAD_BYTES:
                    self._pause(mailbox)

    def _pause(self, mailbox: Mailbox) -> None:
        """Pause the task of a full mailbox."""
        if not mailbox.is_over and mailbox.paused_until == math.inf:
            self._engine.pause(mailbox.task_id)
            mailbox.patience = self._stall_timeout
            self._give_turn(mailbox)

    def _give_turn(self, mailbox: Mailbox) -> None:
        """Give a reader more time. As with `Patience`, a pause of the process costs it one turn."""
        mailbox.paused_until = trio.current_time() + min(mailbox.patience, TURN)
        mailbox.patience -= TURN
        self._watch_at(mailbox.paused_until, mailbox)

    def _watch_at(self, time: float, mailbox: Mailbox) -> None:
        """Look at a mailbox at a time."""
        if len(self._times) >= self._most_times:  # most are of requests that have ended
            self._times = [one for one in self._times if one[1] in self._mailboxes]
            heapq.heapify(self._times)
            self._most_times = 2 * len(self._times) + _MANY_TIMES
        heapq.heappush(self._times, (time, mailbox.task_id))
        if self._times[0][0] == time:
            self._new_time.ring()

    async def watch(self) -> None:
        """Cancel tasks at their deadlines, and those whose readers stay behind for too long.

        This works while the readers are blocked.
        """
        while True:
            with trio.move_on_at(self._times[0][0] if self._times else math.inf):
                await self._new_time.wait()
            now = trio.current_time()
            while self._times and self._times[0][0] <= now:
                mailbox = self._mailboxes.get(heapq.heappop(self._times)[1])
                if mailbox is None:
                    continue
                if mailbox.deadline <= now:
                    self.end(mailbox, DeadlineExceededError(), CancelReason.DEADLINE)
                elif mailbox.paused_until <= now and mailbox.patience > 0:
                    self._give_turn(mailbox)
                elif mailbox.paused_until <= now:
                    self._give_up(mailbox)

    def _give_up(self, mailbox: Mailbox) -> None:
        error = StalledReaderError(
            f"{mailbox.n_unread} tokens were left unread for {self._stall_timeout:g} seconds."
        )
        self.end(mailbox, error, CancelReason.STALLED)
