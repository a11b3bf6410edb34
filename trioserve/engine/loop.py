"""The loop of every engine: a thread, an inbox for commands, and an outbox for events."""

from __future__ import annotations

import abc
import threading
from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic, sleep
from typing import Any

import attrs

from trioserve.engine.backend import AnyBackend, Projector
from trioserve.engine.decoder import Interrupts
from trioserve.engine.encoder import Encoded, MediaEncoder
from trioserve.errors import EngineError, InvalidMediaError, InvalidRequestError
from trioserve.types import (
    AdapterInfo,
    AnyTask,
    Chunks,
    EngineCounters,
    EngineEvent,
    EngineStatus,
    Failed,
    Prompt,
    Returned,
    StepRecord,
)


@attrs.frozen
class Submit:
    """Command: run a task."""

    task: AnyTask


@attrs.frozen
class Cancel:
    """Drop a task, queued or running. Unknown and finished ones are ignored: they may cross."""

    task_id: int


@attrs.frozen
class Pause:
    """Leave a task in its slot, but out of the steps, while its reader is behind; or undo that."""

    task_id: int
    paused: bool = True


@attrs.frozen
class Call:
    """Call a function on the inference thread, between two steps. It must not raise.

    With `slot_id`, that is as soon as this slot is idle. With `reply`, the result comes out of
    `take` as a `Returned`.
    """

    function: Callable[[], object]
    reply: Callable[[Any], object] | None = None
    slot_id: int | None = None


@attrs.frozen
class Stop:
    """Command: end the loop."""


Command = Submit | Cancel | Pause | Call | Encoded | Stop


class Inbox:
    """A queue from any thread to the engine. Waiting on it uses no CPU."""

    def __init__(self) -> None:
        #: Those that were not taken yet.
        self.commands: list[Command] = []
        self._arrived = threading.Condition()
        #: Seconds that an idle engine lets pass after a task, at most, until `settle`: prompts that
        #: arrive together are computed together. 0: `settle` is never called.
        self.gather_s = 0.0
        self.is_settled = True
        #: Called after each `put`, for a driver that calls `EngineLoop.step` itself.
        self.listener: Callable[[], None] | None = None

    def put(self, command: Command) -> None:
        """Append a command. Holds the lock for no longer than that."""
        with self._arrived:
            self.commands.append(command)
            if self.gather_s and isinstance(command, Submit):
                self.is_settled = False
            self._arrived.notify()
        if self.listener is not None:
            self.listener()

    def settle(self) -> None:
        """Note that the event loop has nothing else to do, so that no task comes at once."""
        if not self.is_settled:  # no lock on the way of every turn of the loop
            with self._arrived:
                self.is_settled = True
                self._arrived.notify()

    def take(
        self, until: Callable[[], bool] | None = None, seconds: float | None = None
    ) -> list[Command]:
        """Take all commands; sleep before that `until` something is true, or for some seconds."""
        with self._arrived:
            if until is not None:
                self._arrived.wait_for(until, seconds)
            commands, self.commands = self.commands, []
        return commands

    def has_come(self, task_id: int | None, or_task: bool) -> bool:
        """True if a cancel of a task was not taken yet, or a task that is not of the background."""
        with self._arrived:
            commands = [*self.commands]
        if task_id is not None and Cancel(task_id) in commands:
            return True
        return or_task and any(isinstance(c, Submit) and c.task.priority >= 0 for c in commands)


#: Seconds that the inference thread sleeps after a first token. Otherwise the event loop competes
#: with `llama_decode` for a core, and the token reaches its reader 1 to 2 ms later.
REST = 1e-4
#: After this many idle seconds, the inference thread does what can wait; see `EngineLoop._tidy`.
IDLE_S = 0.25
#: The same for what takes a few milliseconds. A client that has its answer needs as long to send
#: the next request.
SOON_S = 5e-4

#: Seconds that tokens wait for each running stream. So all streams together have at most 200 events
#: a second, beyond those of steps that take longer.
PER_STREAM = 0.005


class EngineLoop(abc.ABC):
    """Runs steps while there is work. Everything but `run` is code that a test can call.

    Args:
        backend: the model.
        notify: called, from the engine's thread, once after each step that left events in the
            outbox, and when the engine has failed. It must not block.
    """

    def __init__(self, backend: AnyBackend, notify: Callable[[], None]) -> None:
        self.info = backend.info
        self.vocab = backend.vocab
        self.n_ctx_seq = backend.n_ctx_seq  # the most tokens of one text
        self.n_slots = backend.n_slots  # requests that are worked on at the same time
        #: Makes embeddings of media; None: the model takes text only.
        self.projector: Projector | None = backend.projector
        self.inbox = Inbox()
        #: Runs the projector in a separate thread.
        self.encoder: MediaEncoder | None = None
        if self.projector is not None:
            self.encoder = MediaEncoder(self.projector, self.inbox.put)
        self._interrupts = Interrupts(backend.interrupt, self.inbox.has_come)
        self._n_batch = backend.n_batch
        self._counters = EngineCounters()
        #: The failure that stopped the engine; its cause is the original exception.
        self.failure: EngineError | None = None
        #: The inference thread, once it runs.
        self.thread_id: int | None = None
        #: The clock that measures steps, in seconds. A test may replace it.
        self.clock: Callable[[], float] = monotonic
        #: When the last step began. While there is work, it advances.
        self.heartbeat = self.clock()
        #: Each gets a record of every step; its reader pops them. Replace the tuple to change it.
        self.watchers: tuple[deque[StepRecord], ...] = ()
        #: Records made so far.
        self.n_records = 0
        #: The batch of this step, if there are watchers: slots, and tokens of each kind.
        self._in_batch = (0, 0, 0)
        self._notify = notify
        self._outbox: list[EngineEvent | Chunks] = []
        self._outbox_lock = threading.Lock()
        self._urgent = False  # an event must not wait for `flush_interval`
        self._is_first = False  # an event has the first token of a task
        #: Seconds that events may wait to leave together, unless they are urgent. With few streams
        #: they wait for less: `PER_STREAM` for each.
        self.flush_interval = 0.0
        self._soon = self._next_flush = 0.0  # when to flush, at a loop that keeps up, and at others
        self._fresh: list[EngineEvent | Chunks] = []  # of this step, not in the outbox yet
        self._n_readers = 0  # who wait for the events of a step
        self._stopping = False
        self._is_busy = False  # there is something to do in the next step
        #: Seconds without a command after which there is something to do; None: there is nothing.
        self._tidy_after: float | None = None

    @property
    def adapters(self) -> Sequence[AdapterInfo]:
        """The LoRA adapters, as `Backend` has them."""
        return ()

    # -- from the event loop's thread

    def submit(self, task: AnyTask) -> None:
        """Run a task that `check` has let through. Its events come out of `take`.

        A batch of the background alone ends, unless the task is of the background, too.
        """
        self.inbox.put(Submit(task))
        if task.priority >= 0:
            self._interrupts.arrive()

    def cancel(self, task_id: int) -> None:
        """Drop a task: its place is free when the next step begins. No event follows.

        A batch that is mostly for its prompt, or for its texts, ends within milliseconds.
        """
        self.inbox.put(Cancel(task_id))
        self._interrupts.cancel(task_id)

    def pause(self, task_id: int) -> None:
        """Keep a task out of the steps until `resume`."""
        self.inbox.put(Pause(task_id))

    def resume(self, task_id: int) -> None:
        self.inbox.put(Pause(task_id, paused=False))

    def call(
        self,
        function: Callable[[], object],
        reply: Callable[[Any], object] | None = None,
        *,
        slot_id: int | None = None,
    ) -> None:
        """Call a function on the inference thread; see `Call`.

        Raises InvalidRequestError if there is no such slot.
        """
        if slot_id is not None and not 0 <= slot_id < self.n_slots:
            raise InvalidRequestError("Invalid slot ID", param="id_slot")
        self.inbox.put(Call(function, reply, slot_id))

    def stop(self) -> None:
        """End the loop after the running step. Tasks that still run get no further event."""
        self.inbox.put(Stop())

    def take(self) -> list[EngineEvent | Chunks]:
        """Take all pending events, oldest first."""
        with self._outbox_lock:
            events, self._outbox = self._outbox, []
        return events

    # -- the threads beside the inference thread

    def start_helpers(self) -> None:
        """Start them, before `run`. Raises ModelLoadError: the system refuses one."""
        if self.encoder is not None:
            self.encoder.start()

    def end_helpers(self) -> None:
        """End those that were started. `run` does so, too."""
        if self.encoder is not None:
            self.encoder.close()

    # -- on the inference thread

    def run(self) -> None:
        """Step until stopped, then close the backend. This is the body of the thread."""
        self.thread_id = threading.get_ident()
        try:
            while not self._stopping:
                self.step(wait=True)
        except BaseException as error:  # not even an Exception: the thread ends
            self._break(error)
        finally:
            self._close()

    def step(self, *, wait: bool = False) -> bool:
        """Take the commands that have come, and run one step if there is work.

        With `wait`, sleep first while there is neither. Returns whether there is work left.
        """
        if wait and not self._is_busy:
            commands = self._wait()
        else:  # no lock on the way of every step
            commands = self.inbox.take() if self.inbox.commands else []
        for command in commands:
            try:
                self._take(command)
            except Exception as error:
                self._break(error)
        if commands:
            self._is_busy = self.has_work and self.failure is None
        began = self.clock()
        if self._is_busy and not self._stopping:
            self.heartbeat = began
            try:
                self._is_busy = self._step()
            except Exception as error:
                self._is_busy = False
                self._break(error)
            if self.watchers:
                self._record_step(began)
            if not self._is_busy:
                self._tidy_after = SOON_S
                self._rest()
        now = self.clock()
        after_next_step = now + (now - began)  # if it takes as long as this one
        # An event loop that has not taken the last events yet is busy.
        due = self._next_flush if self._outbox else self._soon
        if self._urgent or not self._is_busy or after_next_step > due:
            self._flush()
        return self._is_busy

    def _wait(self) -> list[Command]:
        """Sleep until there are commands, or until it is time to tidy."""
        inbox = self.inbox
        commands = inbox.take(until=lambda: bool(inbox.commands), seconds=self._tidy_after)
        if not commands:
            is_soon = self._tidy_after == SOON_S
            if not self._tidy(is_soon=is_soon):
                self._tidy_after = IDLE_S if is_soon else None
        elif not inbox.is_settled:  # other tasks arrive together with the first one
            end = self.clock() + inbox.gather_s
            while not inbox.is_settled and self._tidy(is_soon=True):
                pass
            seconds = max(0.0, end - self.clock())
            commands += inbox.take(until=lambda: inbox.is_settled, seconds=seconds)
        return commands

    def _take(self, command: Command) -> None:
        match command:
            case Call(slot_id=None):
                self._make(command)
            case Stop():
                self._stopping = True
            case Submit(task) if self.failure is not None:
                self._emit(Failed(task.id, self.failure))
            case _:
                self._obey(command)

    def _make(self, call: Call) -> None:
        value = call.function()
        if call.reply is not None:
            self._emit(Returned(call.reply, value))

    def _record_step(self, began: float) -> None:
        self.n_records += 1
        ms = (self.clock() - began) * 1e3
        record = StepRecord(self.n_records, began, ms, *self._in_batch, *self._load())
        self._in_batch = (0, 0, 0)
        for records in self.watchers:
            records.append(record)

    def _break(self, error: BaseException) -> None:
        """Stop the engine, end all tasks, and wake the event loop, which checks `failure`."""
        if self.failure is not None:
            return
        self.failure = EngineError("The inference engine failed.")
        self.failure.__cause__ = error
        try:
            self._fail_all(self.failure)
        except Exception as failed:  # a broken engine may fail here, too
            error.add_note(f"Its tasks could not be ended: {failed!r}.")
        self._flush()
        self._notify()

    def check_works(self) -> None:
        """Raise EngineError if the engine has failed."""
        if self.failure is not None:
            raise self.failure.again()

    def check_media(self, prompt: Prompt, param: str) -> None:
        """Refuse media that a model does not take, or not at once. From any thread.

        Raises:
            InvalidMediaError: a chunk is too large.
            InvalidRequestError: the model takes text only. Both name `param`.
        """
        if not prompt.media:
            return
        if self.projector is None:
            raise InvalidRequestError("The model takes text only.", param=param)
        most = min(self._n_batch, self.projector.max_chunk or self._n_batch)
        for _, chunk in prompt.media:
            if not chunk.is_causal and chunk.n_cells > most:
                raise InvalidMediaError(
                    f"The {chunk.kind} takes {chunk.n_cells} tokens, which must be decoded at once;"
                    f" {most} is the most of them. --ubatch-size raises that.",
                    param=param,
                )

    # -- what an engine does

    @abc.abstractmethod
    def check(self, task: AnyTask) -> None:
        """Refuse a task that can never run, before it is submitted.

        Raises:
            InvalidRequestError: the task can never run.
            NotSupportedError: this engine does not run such tasks.
            EngineError: the engine has failed.
        """

    @property
    @abc.abstractmethod
    def has_work(self) -> bool:
        """True if there is anything to do in a step."""

    @abc.abstractmethod
    def status(self) -> EngineStatus:
        """Describe the slots and the queue. Use it through `call`."""

    @abc.abstractmethod
    def _load(self) -> tuple[int, int]:
        """Count the tasks that have a slot, and those that wait for one."""

    @abc.abstractmethod
    def _obey(self, command: Command) -> None:
        """Obey a command that not all engines obey in the same way."""

    @abc.abstractmethod
    def _step(self) -> bool:
        """Run one step; returns whether there is anything to do in the next one."""

    @abc.abstractmethod
    def _rest(self) -> None:
        """Note that there is nothing to do in the next step."""

    def _tidy(self, *, is_soon: bool) -> bool:
        """Do a little of what can wait until no task runs; returns whether there may be more.

        With `is_soon`, only what takes a few milliseconds: the next task may be on its way.
        """
        return False

    @abc.abstractmethod
    def _fail_all(self, error: EngineError) -> None:
        """End all tasks with an error: the engine is broken."""

    @abc.abstractmethod
    def _close(self) -> None:
        """Free the tasks and the backend."""

    # -- the outbox

    def _emit(self, event: EngineEvent) -> None:
        """Queue an event that is sent with this step."""
        self._fresh.append(event)
        self._urgent = True

    def _retract(self, task_id: int) -> None:
        """Drop the events of a task that are not in the outbox yet."""
        self._fresh = [
            event.without(task_id) if isinstance(event, Chunks) else event
            for event in self._fresh
            if isinstance(event, Chunks) or event.task_id != task_id
        ]

    def _flush(self) -> None:
        """Hand the events over: one append, one notification."""
        is_first, self._urgent, self._is_first = self._is_first, False, False
        now, interval = self.clock(), self.flush_interval
        self._next_flush = now + interval
        self._soon = now + min(interval, PER_STREAM * self._n_readers)
        if not self._fresh:
            return
        fresh, self._fresh = self._fresh, []
        with self._outbox_lock:
            self._outbox += fresh
        self._notify()
        if is_first:
            sleep(REST)
