"""`Connection`: the app's side of the socket to the process of a model."""

from __future__ import annotations

import math
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing
from functools import partial
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import attrs
import trio

from trioserve.children.frames import FrameError, FrameStream
from trioserve.children.reports import Ready, Report, Sleeping
from trioserve.concurrency import Feed, alongside
from trioserve.errors import ModelProcessError, TrioServeError
from trioserve.fair_limiter import offload
from trioserve.model_process.messages import (
    MAX_UNREAD_SOUNDS,
    Adapted,
    AdapterFacts,
    Advanced,
    Answered,
    Call,
    Cancel,
    Ended,
    EndTask,
    Erred,
    FromApp,
    Heard,
    Introduced,
    Moved,
    Opened,
    Pause,
    Refused,
    Resume,
    Said,
    Scored,
    Spoke,
    Took,
    Wrote,
    read_said,
    read_value,
    write,
)
from trioserve.model_process.questions import question_of
from trioserve.server.dispatch import UNREAD_BYTES, Mailbox
from trioserve.server.model import LoadedModel
from trioserve.server.stream import Source
from trioserve.server.transcription.transcript import TranscriptEvent
from trioserve.types import CancelReason, Chunk, Event, Failed, Prompt, Sound, Spoken

_T = TypeVar("_T")
_P = ParamSpec("_P")

#: Tokens and bytes in a mailbox above which the process sends no more of its task, and what it may
#: have sent until it knows that.
_UNREAD_TOKENS = 256
_MAX_UNREAD = 16 * UNREAD_BYTES

#: Events of a call that may be unread.
_MAX_EVENTS = 2**16

#: Bytes of an answer.
_MAX_ANSWER = 2**30


@attrs.define
class Known:
    """The known properties of a model in another process."""

    model: LoadedModel | None = None  # once it has been loaded
    adapters: AdapterFacts | None = None  # of the loaded model
    sleeping: bool = False  # whether the process has freed its memory


@attrs.define(eq=False)
class OpenCall:
    """A call that was answered."""

    source: Source  # of the streams that it opens
    value: Any = None
    mailboxes: list[Mailbox] = attrs.field(factory=list)  # of the tasks that it opened
    prompts: list[Prompt] = attrs.field(factory=list)  # of each
    events: Feed[TranscriptEvent] = attrs.field(factory=Feed)  # of a transcript
    sounds: Feed[Sound | Spoken] = attrs.field(factory=Feed)  # of speech
    _answer: Feed[Any] = attrs.field(factory=Feed)
    _gives: Any = None
    _took: Callable[[], None] = lambda: None  # an event of speech was read
    _written: bytearray = attrs.field(factory=bytearray)
    _is_answered: bool = False

    def answer(self, piece: Answered) -> list[Mailbox]:
        """Take an answer, or a piece of one; returns the mailboxes of the tasks that it opens.

        Raises FrameError.
        """
        if self._is_answered:
            raise FrameError("it answers a call twice")
        self._written += piece.value
        if len(self._written) > _MAX_ANSWER:
            raise FrameError("it sends more than it may")
        if not piece.is_last:
            return []
        read, self._is_answered = read_value(self._written, self._gives), True
        if isinstance(read, Opened):
            self.prompts = [facts.prompt for _, facts in read.tasks]
            self.mailboxes = [
                Mailbox(id_, len(prompt))
                for (id_, _), prompt in zip(read.tasks, self.prompts, strict=True)
            ]
        self._answer.put(read)
        return self.mailboxes

    def end(self, error: TrioServeError) -> None:
        """Fail what waits for the answer, or for more."""
        self._answer.end(error)
        self.events.end(error)
        self.sounds.end(error)

    async def next_sound(self) -> Sound | Spoken:
        """Wait for the next event of speech. Cancelling it loses nothing."""
        event = await anext(self.sounds)
        self._took()
        return event

    async def wait(self) -> None:
        """Wait for the answer. Raises TrioServeError: it is an error."""
        self.value = await anext(self._answer)


class Line(Protocol):
    """Leads to the process of a model."""

    @property
    def known(self) -> Known:
        """The known properties of the model."""

    def open(
        self, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> AbstractAsyncContextManager[OpenCall]:
        """Call a method of `ModelServer` in the process; the call ends with the block.

        Raises:
            TrioServeError: the call has failed.
            ModelProcessError: the process has ended.
        """


async def ask(
    line: Line,
    method: Callable[Concatenate[Any, _P], Awaitable[_T]],
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> _T:
    """Call a method, and return its result. Raises as `Line.open`."""
    async with line.open(method, *args, **kwargs) as call:
        return cast(_T, question_of(method).result.read(call.value))


#: Bytes of the files and texts of a call above which it is written in a thread.
_LONG = 2**18


class Connection:
    """Calls to a process, and the output of its tasks.

    `outgoing` has the frames to send. Who reads the socket gives what comes to `take`, and ends
    this when the process has.
    """

    def __init__(self, unread_tokens: int = _UNREAD_TOKENS) -> None:
        self.outgoing: Feed[bytes] = Feed()
        self._unread_tokens = unread_tokens
        self._n_calls = 0
        self._calls: dict[int, OpenCall] = {}
        self._mailboxes: dict[int, Mailbox] = {}
        self._error: TrioServeError | None = None
        #: The known properties of the model.
        self.known = Known()

    @property
    def has_ended(self) -> bool:
        """True if the process has ended."""
        return self._error is not None

    def close(self, error: TrioServeError | None = None) -> None:
        """End all calls and streams with an error, because the process has ended."""
        error = self._error = self._error or error or ModelProcessError()
        for call in self._calls.values():
            call.end(error.again())
        for mailbox in self._mailboxes.values():
            mailbox.end(error.again())
        self._calls, self._mailboxes = {}, {}
        self.outgoing.end()

    def refuse(self, error: TrioServeError) -> None:
        """End all calls and streams with an error, and those to come, while the process lives."""
        self._error = error
        for mailbox in list(self._mailboxes.values()):
            self.end(mailbox, error.again(), CancelReason.SHUTDOWN)
        for id_, call in self._calls.items():
            call.end(error.again())
            if not call.mailboxes:
                self._send(Cancel(id_))

    # -- calls

    @asynccontextmanager
    async def open(
        self, method: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> AsyncIterator[OpenCall]:
        """See `Line.open`."""
        self._n_calls += 1
        question, id_ = question_of(method), self._n_calls
        message = Call(id_, question.name, cast(Any, question.ask(*args, **kwargs)))
        payload = await offload(lambda: write(message), _size((args, kwargs)), _LONG)
        if self._error is not None:
            raise self._error.again()
        took = partial(self._send, Took(id_))
        call = self._calls[id_] = OpenCall(self, gives=question.result.type, took=took)
        self.outgoing.put(payload)
        has_ended = False
        try:
            await call.wait()
            has_ended = not question.lasts
            yield call
        except TrioServeError:
            has_ended = has_ended or call.value is None
            raise
        finally:
            self._calls.pop(id_, None)
            is_over = bool(call.mailboxes)
            for mailbox in call.mailboxes:
                is_over = is_over and mailbox.is_over
                self._mailboxes.pop(mailbox.task_id, None)
                mailbox.end()
            if not (has_ended or is_over):
                self._send(Cancel(id_))

    def _send(self, message: FromApp) -> None:
        if not self.outgoing.is_over:
            self.outgoing.put(write(message))

    # -- streams: see `trioserve.server.stream.Source`

    def resume(self, mailbox: Mailbox) -> None:
        """Have the process send the output of a task again."""
        if mailbox.paused_until < math.inf:
            mailbox.paused_until = math.inf
            self._send(Resume(mailbox.task_id))

    def end(self, mailbox: Mailbox, error: TrioServeError, reason: CancelReason) -> None:
        """Cancel a task; its reader gets the error."""
        if not mailbox.is_over:
            mailbox.end(error, now=True)
            self._send(EndTask(mailbox.task_id, reason))

    # -- what the process says

    def take(self, said: list[Said]) -> None:
        """Take what comes. Raises FrameError: it cannot be."""
        for message in said:
            if isinstance(message, Wrote):
                self._wrote(message)
            else:
                self._take(message)

    def _wrote(self, wrote: Wrote) -> None:
        mailbox = self._mailboxes.get(wrote.task_id)
        if mailbox is None or mailbox.is_over:
            return  # it was cancelled meanwhile
        if len(wrote.tokens) == 1 and not (wrote.pace or wrote.drafts[0]):
            mailbox.put_token(wrote.text, wrote.tokens[0])
        else:
            chunk = Chunk(wrote.task_id, wrote.text, wrote.tokens, (), wrote.pace, wrote.drafts)
            mailbox.put(chunk)
        self._watch(mailbox)

    def _put(self, task_id: int, event: Event) -> None:
        mailbox = self._mailboxes.get(task_id)
        if mailbox is not None and not mailbox.is_over:
            mailbox.put(event)
            self._watch(mailbox)

    def _watch(self, mailbox: Mailbox) -> None:
        """Have the process wait while a reader is slow."""
        if mailbox.n_unread < self._unread_tokens and mailbox.n_bytes < UNREAD_BYTES:
            return
        if mailbox.n_bytes > _MAX_UNREAD:
            raise FrameError("it sends more than it may")
        if mailbox.paused_until == math.inf and not mailbox.is_over:
            mailbox.paused_until = 0.0
            self._send(Pause(mailbox.task_id))

    def _take(self, message: Said) -> None:
        match message:
            case Scored(chunk):
                self._put(chunk.task_id, chunk)
            case Advanced(progress):
                self._put(progress.task_id, progress)
            case Ended(finished):
                self._put(finished.task_id, finished)
            case Erred(task_id, error):
                self._put(task_id, Failed(task_id, error.error))
            case Moved(task_id, queued):
                if (mailbox := self._mailboxes.get(task_id)) is not None:
                    mailbox.queued = queued
                    mailbox.had_slot = mailbox.had_slot or not queued
            case Adapted(adapters):
                self.known.adapters = adapters
            case Answered(id_) | Refused(id_) | Heard(id_) | Spoke(id_):
                if (call := self._call(id_)) is not None:
                    self._take_of(call, message)

    def _call(self, id_: int) -> OpenCall | None:
        """The call of a number; None: it was cancelled. Raises FrameError: it was never made."""
        if not 0 < id_ <= self._n_calls:
            raise FrameError("it answers a call that was never made")
        return self._calls.get(id_)

    def _take_of(self, call: OpenCall, message: Answered | Refused | Heard | Spoke) -> None:
        match message:
            case Answered():
                for mailbox in call.answer(message):
                    if self._mailboxes.setdefault(mailbox.task_id, mailbox) is not mailbox:
                        raise FrameError("two of its tasks have the same number")
            case Refused(_, error):
                call.end(error.error)
            case Heard():
                call.events.put(message.event)
                if len(call.events) > _MAX_EVENTS:
                    raise FrameError("it sends more than it may")
            case Spoke():
                call.sounds.put(message.event)
                if len(call.sounds) > MAX_UNREAD_SOUNDS:
                    raise FrameError("it sends more than it may")


async def converse(
    line: Connection,
    connection: socket.socket,
    learn: Callable[[Introduced], LoadedModel],
    on_report: Callable[[Report], None],
) -> None:
    """Send what a line has for its process, and take what that says, until it has ended.

    Args:
        learn: makes the model as it was introduced; may take long.
        on_report: called with reports.

    Raises:
        FrameError: the process says what cannot be.
        TrioServeError: the model cannot be used.
    """

    async def take(said: Report | list[Said]) -> None:
        if isinstance(said, list):
            if said and isinstance(first := said[0], Introduced):
                line.known.model = await trio.to_thread.run_sync(learn, first)
            line.take(said)
            return
        if isinstance(said, Ready | Sleeping):
            line.known.sleeping = isinstance(said, Sleeping)
        on_report(said)

    frames = FrameStream(connection)
    with closing(line):
        async with alongside(partial(_send, line, frames)):
            while (payload := await frames.receive()) is not None:
                await take(read_said(payload))


async def _send(line: Connection, frames: FrameStream) -> None:
    async for payload in line.outgoing:
        if not await frames.send(payload):
            return


def _size(value: object) -> int:
    """About how many bytes the texts and files of a value are."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple):
        if value and isinstance(value[0], int):
            return 4 * len(value)
        return sum(map(_size, value))
    return 16
