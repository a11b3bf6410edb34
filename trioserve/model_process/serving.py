"""The process of a model: answers the calls of an app with a `Server`."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial

import attrs
import msgspec
import trio

from trioserve.children.frames import MAX_FRAME
from trioserve.children.parent import ParentSocket
from trioserve.children.reports import Report
from trioserve.concurrency import Bell, alongside
from trioserve.errors import TrioServeError, raised_alone
from trioserve.fair_limiter import offload
from trioserve.log import get_logger
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
    PromptFacts,
    Refused,
    Resume,
    Said,
    Scored,
    SentError,
    Speaks,
    Spoke,
    Took,
    Wrote,
    read_order,
    write,
)
from trioserve.model_process.questions import question_named
from trioserve.server.generation.text import ChatOpening
from trioserve.server.server import Server
from trioserve.server.speech.speech import SpeechStream
from trioserve.server.stream import Stream
from trioserve.server.transcription.transcript import Summary, TranscriptEvent, TranscriptStream
from trioserve.types import Chunk, Event, Failed, Finished, Progress

_log = get_logger("trioserve.child")


#: Bytes of an answer that go in one message.
_PIECE = MAX_FRAME // 4

#: Bytes of a call. The app bounds its requests, and what they have in them.
MAX_ORDER = 2**32 - 1

#: Bytes of a call above which it is read in a thread.
_LONG = 2**18


@attrs.define(eq=False)
class _Forwarded:
    """A stream whose events are sent."""

    stream: Stream
    ended: trio.Event = attrs.field(factory=trio.Event)
    is_paused: bool = False  # its reader is slow
    is_awaited: bool = False  # it is waited for, or there is something to send of it
    is_full: bool = False  # there is something to send of it

    @property
    def can_be_taken(self) -> bool:
        """True if it has output to send, and may send it."""
        return self.is_full and not (self.is_paused or self.ended.is_set())


class Outbox:
    """Reads the mailboxes of all streams, and sends what is in them: a frame for each step.

    While the app does not read, it takes nothing: mailboxes fill, and their tasks are paused.

    Args:
        wait_sent: waits until it has taken all.
    """

    def __init__(self, parent: ParentSocket, wait_sent: Callable[[], Awaitable[None]]) -> None:
        self._parent, self._wait_sent = parent, wait_sent
        self._is_behind = False  # the socket is full
        self._said: list[Said] = []
        self._full: list[_Forwarded] = []
        self._streams: dict[int, _Forwarded] = {}
        self._bell, self._emptied = Bell(), Bell()
        self.in_step = False  # its output goes at the end of the step

    def report(self, report: Report) -> None:
        """Send a report with the next frame."""
        self._parent.add(msgspec.msgpack.encode(report))
        self._ring()

    def say(self, message: Said) -> None:
        """Say something with the next frame."""
        self._said.append(message)
        self._ring()

    def add(self, stream: Stream) -> _Forwarded:
        """Send the events of a stream."""
        forwarded = _Forwarded(stream)
        self._streams[stream.task_id] = forwarded
        mailbox = stream.mailbox
        mailbox.on_move = lambda: self.say(Moved(mailbox.task_id, mailbox.queued))
        self._await(forwarded)
        return forwarded

    def remove(self, forwarded: _Forwarded) -> None:
        """Send no more of a stream."""
        self._streams.pop(forwarded.stream.task_id, None)
        forwarded.ended.set()

    def pause(self, task_id: int) -> None:
        """Take nothing from a mailbox, until `resume`."""
        if (forwarded := self._streams.get(task_id)) is not None:
            forwarded.is_paused = True

    def resume(self, task_id: int) -> None:
        """Take what is in a mailbox."""
        forwarded = self._streams.get(task_id)
        if forwarded is not None and forwarded.is_paused:
            forwarded.is_paused = False
            if forwarded.is_full:
                self._note(forwarded)

    def stream(self, task_id: int) -> Stream | None:
        """The stream of a task, if its events are sent."""
        forwarded = self._streams.get(task_id)
        return None if forwarded is None else forwarded.stream

    async def run(self) -> None:
        """Send, until cancelled."""
        while True:
            await self._bell.wait()
            self.flush()
            if self._is_behind:
                await self._wait_sent()
                self._is_behind = False
                self._await_all(self._streams.values())
                self.flush()  # what steps have left
                self._emptied.ring()

    async def until_empty(self) -> None:
        """Wait until all has been sent."""
        while self._said or self._full or self._is_behind:
            await self._emptied.wait()

    def flush(self) -> None:
        """Send all output that has come, unless the socket is full."""
        if self._is_behind:
            return
        if not (self._said or self._full):
            self._note_sent(self._parent.flush())
            return
        # One may have been noted twice, or was paused or removed meanwhile.
        full = [each for each in dict.fromkeys(self._full) if each.can_be_taken]
        self._full, said, self._said = [], self._said, []
        for each in full:
            said += self._take(each)
        for payload in _payloads(said) if said else ():
            self._note_sent(self._parent.send(payload))
        if not self._is_behind:
            self._await_all(full)
            self._emptied.ring()

    def _await_all(self, streams: Iterable[_Forwarded]) -> None:
        for each in list(streams):
            if not (each.is_awaited or each.ended.is_set()):
                self._await(each)

    def _note_sent(self, is_all: bool) -> None:
        """Note whether the socket has taken all; `run` waits for that otherwise."""
        self._is_behind = not is_all
        if self._is_behind:
            self._bell.ring()

    def _ring(self) -> None:
        if not self.in_step:
            self._bell.ring()

    def _await(self, forwarded: _Forwarded) -> None:
        forwarded.is_awaited, forwarded.is_full = True, False
        forwarded.stream.mailbox.call_when_ready(partial(self._note, forwarded))

    def _note(self, forwarded: _Forwarded) -> None:
        forwarded.is_full = True
        if forwarded.ended.is_set():
            return
        if not forwarded.is_paused:
            self._full.append(forwarded)
            self._ring()

    def _take(self, forwarded: _Forwarded) -> list[Said]:
        stream, forwarded.is_awaited, forwarded.is_full = forwarded.stream, False, False
        try:
            events = stream.take()
        except TrioServeError as error:
            events = [Failed(stream.task_id, error)]
        if isinstance(events[-1], Finished | Failed):
            forwarded.ended.set()
        return [*map(_said, events)]


def _payloads(said: list[Said]) -> Iterator[bytes]:
    """Write a frame, or several of a bounded size."""
    payload = write(said)
    if len(payload) <= MAX_FRAME or len(said) == 1:
        yield payload
        return
    middle = len(said) // 2
    yield from _payloads(said[:middle])
    yield from _payloads(said[middle:])


def _said(event: Event) -> Said:
    if isinstance(event, Chunk):
        if event.probs or event.scores is not None:
            return Scored(event)
        return Wrote(event.task_id, event.text, event.tokens, event.pace, event.drafts)
    if isinstance(event, Progress):
        return Advanced(event)
    if isinstance(event, Finished):
        return Ended(event)
    assert isinstance(event, Failed)
    return Erred(event.task_id, SentError.of(event.error))


@attrs.define(eq=False, slots=False)
class ModelProcess:
    """Serves the app at the other end of a socket."""

    server: Server
    _receive: Callable[[], Awaitable[bytes | None]]  # the next order; None: the app has gone
    outbox: Outbox
    #: Of all apps that are answered with this server.
    outboxes: list[Outbox] = attrs.field(factory=list)
    _calls: dict[int, trio.CancelScope] = attrs.field(init=False, factory=dict)
    #: Of calls that speak: places for sound that the app has not read.
    _places: dict[int, trio.Semaphore] = attrs.field(init=False, factory=dict)
    _scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)

    def introduction(self) -> bytes:
        """Write what the model is, which is in memory."""
        said: list[Said] = [Introduced.of(self.server.model)]
        if self.server.adapters.possible:
            said.append(Adapted(AdapterFacts.of(self.server.adapters)))
        return write(said)

    def __attrs_post_init__(self) -> None:
        self.outboxes.append(self.outbox)
        self.server.resources.step = self._step

    def _step(self, deliver: Callable[[], None]) -> None:
        """Send what the events of a step are, once they are in the mailboxes."""
        for outbox in self.outboxes:
            outbox.in_step = True
        try:
            deliver()
        finally:
            for outbox in self.outboxes:
                outbox.in_step = False
                outbox.flush()

    async def run(self) -> None:
        """Serve until the app has gone, or everything is drained."""
        with self._scope:
            async with alongside(self.outbox.run) as nursery:
                while (payload := await self._receive()) is not None:
                    message = await offload(partial(read_order, payload), len(payload), _LONG)
                    self._do(message, nursery)

    async def drain(self, timeout: float) -> None:
        """Let what runs finish, within a time in seconds, and end."""
        await self.server.drain(timeout)
        for outbox in self.outboxes:
            await outbox.until_empty()
        await self.finish()

    async def finish(self) -> None:
        """Wait until all has been said, and end."""
        await self.outbox.until_empty()
        self._scope.cancel()

    def _do(self, message: FromApp, nursery: trio.Nursery) -> None:
        match message:
            case Call():
                scope = self._calls[message.id] = trio.CancelScope()
                nursery.start_soon(self._answer, message, scope)
            case Cancel(id):
                if (running := self._calls.get(id)) is not None:
                    running.cancel()
            case EndTask(id, reason):
                if (stream := self.outbox.stream(id)) is not None:
                    stream.cancel(reason)
            case Pause(id):
                self.outbox.pause(id)
            case Resume(id):
                self.outbox.resume(id)
            case Took(id):
                if (places := self._places.get(id)) is not None:
                    places.release()

    async def _answer(self, call: Call, scope: trio.CancelScope) -> None:
        try:
            with scope:
                await self._work(call)
        except Exception as group:
            error = raised_alone(group)
            if not isinstance(error, TrioServeError):
                _log.exception("a call has failed", exc_info=error)
                error = TrioServeError("The process of the model has failed.")
            self.outbox.say(Refused(call.id, SentError.of(error)))
        finally:
            del self._calls[call.id]

    async def _work(self, call: Call) -> None:
        question = question_named(call.name)
        result = getattr(self.server, call.name)(**question.read(call.fields))
        if question.lasts:
            async with result as opened:
                await self._serve_opened(call.id, opened)
            return
        answer = question.result.write(await result)
        if question.adapts:
            adapted = Adapted(AdapterFacts.of(self.server.adapters))
            for outbox in self.outboxes:
                outbox.say(adapted)
        self._tell(call.id, answer)

    def _tell(self, id_: int, value: object) -> None:
        """Answer a call."""
        written = write(value)
        for at in range(0, len(written), _PIECE):
            end = at + _PIECE
            self.outbox.say(Answered(id_, written[at:end], is_last=end >= len(written)))

    async def _serve_opened(self, id_: int, opened: object) -> None:
        """Answer with what a call has opened, and send its events until it has ended."""
        match opened:
            case TranscriptStream():
                self._tell(id_, opened.duration)
                event: TranscriptEvent | None = None
                while not isinstance(event, Summary):
                    event = await anext(opened)
                    self.outbox.say(Heard.of(id_, event))
            case SpeechStream():
                await self._serve_speech(id_, opened)
            case ChatOpening() as opening, list(streams):
                await self._forward(id_, streams, opening)
            case list(streams):
                await self._forward(id_, streams)
            case _:  # the model is kept in memory
                self._tell(id_, None)
                await trio.sleep_forever()

    async def _serve_speech(self, id_: int, stream: SpeechStream) -> None:
        """Send sound as the app reads it."""
        self._tell(id_, Speaks(stream.rate, stream.n_prompt))
        places = self._places[id_] = trio.Semaphore(MAX_UNREAD_SOUNDS)
        try:
            while stream.finished is None:
                await places.acquire()
                self.outbox.say(Spoke.of(id_, await stream.next_event()))
        finally:
            del self._places[id_]

    async def _forward(
        self, id_: int, streams: Sequence[Stream], opening: ChatOpening | None = None
    ) -> None:
        tasks = [(each.task_id, PromptFacts.of(each.prompt)) for each in streams]
        self._tell(id_, Opened(tasks, opening))
        forwarded = [self.outbox.add(each) for each in streams]
        try:
            for each in forwarded:
                await each.ended.wait()
        finally:
            for each in forwarded:
                self.outbox.remove(each)
