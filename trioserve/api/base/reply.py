"""`Reply`: the answer to a request, before it is bytes.

A handler returns one. The edge sends it, a batch writes it into a file, and a session keeps its
events for clients that read them later (`trioserve.api.sessions`).
"""

from __future__ import annotations

import math
from collections.abc import (
    AsyncGenerator,
    AsyncIterable,
    Awaitable,
    Callable,
    Iterable,
    Iterator,
    Sequence,
)
from functools import partial
from json import loads
from typing import Any, Generic, TypeAlias, TypeVar

import attrs
import trio

from trioserve.api.base import sse
from trioserve.api.base.caller import Caller
from trioserve.concurrency import Feed, alongside
from trioserve.errors import TrioServeError
from trioserve.fair_limiter import text_threads
from trioserve.server.compaction import CompactedEvent
from trioserve.server.dispatch import Mailbox
from trioserve.server.generation.requests import Queue
from trioserve.server.runs.events import RunEnded, RunEvent, StepStarted
from trioserve.server.speech.speech import SpeechEvent
from trioserve.server.stream import (
    ChatChunk,
    ChatCompletion,
    ChatStream,
    Completion,
    Stream as TokenStream,
)
from trioserve.server.transcription.transcript import Summary, TranscriptEvent
from trioserve.types import Chunk, Finished, Progress

_E = TypeVar("_E", bound=sse.Event | RunEvent | TranscriptEvent | SpeechEvent | CompactedEvent)

JSON = "application/json"


async def _ping() -> bytes:
    return sse.PING


@attrs.frozen
class KeepAlive:
    """Comments to send after `interval` seconds of silence in an answer; `comment` makes each."""

    interval: float
    comment: Callable[[], Awaitable[bytes]] = _ping

    @classmethod
    def every(cls, seconds: float) -> KeepAlive:
        """Send pings, unless the number of seconds is 0 or less."""
        return cls(seconds if seconds > 0 else math.inf)


@attrs.frozen
class Pings:
    """The comments of a response while its streams, which have these mailboxes, are silent.

    `interval` is the number of silent seconds before a ping; infinite: no pings. With
    `tell_place`, the response reports the place in the queue soon, and again after each change.
    """

    interval: float
    queue: Queue | None = None
    mailboxes: Sequence[Mailbox] = ()
    tell_place: bool = False

    def is_queued(self) -> bool:
        """True until one of the streams has a slot."""
        return self.queue is not None and all(mailbox.queued for mailbox in self.mailboxes)

    def pause(self) -> float:
        """Seconds until the next comment, for as long as nothing else was sent."""
        return sse.LOOK_INTERVAL if self.tell_place and self.is_queued() else math.inf

    async def comment(self) -> bytes:
        """Write a comment for a silent stream: its place in the queue, or just a ping."""
        if self.queue is not None and self.is_queued():
            with trio.move_on_after(sse.LOOK_TIMEOUT):
                place = await self.queue.first_of([each.task_id for each in self.mailboxes])
                if place is not None:
                    return sse.comment_on(place)
        return sse.PING


@attrs.define(kw_only=True, eq=False)
class Reply:
    """An answer: its status, its headers, and one of the kinds of bodies below."""

    status: int = 200
    headers: dict[str, str] = attrs.field(factory=dict)
    content_type: str = JSON
    keep_alive: KeepAlive | None = None

    async def write(self) -> Iterable[bytes] | AsyncIterable[bytes]:
        """Write the body: all of its pieces, or those that come."""
        return ()


@attrs.define(kw_only=True, eq=False)
class Data(Reply):
    """An answer that is bytes already."""

    body: bytes = b""

    async def write(self) -> Iterable[bytes]:
        return (self.body,) if self.body else ()


@attrs.define(kw_only=True, eq=False)
class Pieces(Reply):
    """An answer whose bytes come."""

    pieces: AsyncIterable[bytes]

    async def write(self) -> AsyncIterable[bytes]:
        return self.pieces


# -- JSON


#: The most bytes of JSON that are read or written on the event loop, which takes about 1 ms; and
#: the same in numbers of a list.
LONG, _SMALL = 2**18, 8192

#: Characters of a long answer in each piece.
_PIECE = 2**18


@attrs.define(kw_only=True, eq=False)
class Json(Reply):
    """A value that becomes JSON.

    Attributes:
        make: returns the value; it may take long, too.
        size: how long the JSON is, in numbers of a list. An object of a few fields counts as 32,
            and 32 characters as one.
    """

    make: Callable[[], Any]
    size: int = 0

    async def write(self) -> Sequence[bytes]:
        """Write the JSON, in a thread if it is long. What is no Unicode in it is replaced."""
        if self.size <= _SMALL:
            return (sse.encode(self.make()).encode(errors="replace"),)
        make = self.make
        return await text_threads().run_sync(lambda: list(_pieces(sse.encode_in_steps(make()))))


def json(value: Any, status: int = 200, **headers: str) -> Json:
    """Answer with a value that is short as JSON."""
    return Json(make=lambda: value, status=status, headers=headers)


def long_json(make: Callable[[], Any], size: int) -> Json:
    """Answer with what a function returns, whose JSON may be long; see `Json`."""
    return Json(make=make, size=size)


async def value_of(reply: Reply) -> tuple[Callable[[], Any], int]:
    """A function that makes the value of a reply, and about how many bytes it has as JSON.

    The value of what is no JSON is its text.
    """
    if isinstance(reply, Json):
        return reply.make, LONG // _SMALL * reply.size
    pieces = await reply.write()
    data = b"".join(
        [each async for each in pieces] if isinstance(pieces, AsyncIterable) else pieces
    )

    def make() -> Any:
        try:
            return loads(data)
        except ValueError:
            return data.decode(errors="replace")

    return make, len(data)


def _pieces(texts: Iterable[str]) -> Iterator[bytes]:
    """Gather texts: what is handled at once, by Hypercorn too, holds up other threads."""
    some: list[str] = []
    size = 0
    for text in texts:
        some.append(text)
        size += len(text)
        if size >= _PIECE:
            yield "".join(some).encode(errors="replace")
            some, size = [], 0
    yield "".join(some).encode(errors="replace")


def size_of_outputs(outputs: Iterable[Completion | ChatCompletion]) -> int:
    """The size of outputs, as `Json` counts it."""
    size = 0
    for each in outputs:
        size += len(each.prompt) + 32 * sse.n_candidates(each.probs)
        if (scores := each.scores) is not None:
            size += 32 * len(scores) * (1 + scores.n_top)
    return size


# -- events


@attrs.frozen
class EventSource(Generic[_E]):
    """The events of one or more streams as they come, each with the number of its stream.

    `next` waits for the next one, and raises what the streams raise. Cancelling it loses nothing.
    There are `n_streams` last events in all, of type `Finished`, `RunEnded` or `Summary`.
    """

    n_streams: int
    next: Callable[[], Awaitable[tuple[int, _E]]]

    @classmethod
    def of(cls, take: Callable[[], Awaitable[_E]]) -> EventSource[_E]:
        """Make the source of a single stream, whose next event a function takes."""

        async def next_event() -> tuple[int, _E]:
            return 0, await take()

        return EventSource(1, next_event)


async def open_source(
    caller: Caller, streams: Sequence[TokenStream | ChatStream]
) -> EventSource[sse.Event]:
    """Make the source of several streams, which runs as long as the request of a caller."""
    if len(streams) == 1:
        return EventSource.of(streams[0].next_event)
    # Room for one: if the client does not read, tokens must stay in the mailboxes, as these are
    # watched.
    events: Feed[tuple[int, sse.Event]] = Feed(size=1)

    async def pump(index: int, stream: TokenStream | ChatStream) -> None:
        try:
            event: sse.Event | None = None
            while not isinstance(event, Finished):
                event = await stream.next_event()
                await events.room()
                events.put((index, event))
        except TrioServeError as error:
            events.end(error)

    await caller.open(alongside(*(partial(pump, i, each) for i, each in enumerate(streams))))
    return EventSource(len(streams), events.__anext__)


#: Turns an error that ends an answer which had begun into bytes.
OnError: TypeAlias = Callable[[Exception], bytes]

#: Candidates, and tokens of a prompt, that are written on the event loop: it takes about 1 ms.
_MANY_CANDIDATES = 256
_MANY_TOKENS = 16384


class Last(bytes):
    """The last piece of an answer, which its end goes with."""


@attrs.define(kw_only=True, eq=False)
class Ending(Reply):
    """Events whose end others wait for.

    Attributes:
        writer: writes them, and knows how far they are.
        at_end: called with what is sent last, before it is; gives what is sent in its place.
        failure: why they ended early; None: they did not.
    """

    writer: Any
    failure: Exception | None = None
    at_end: Callable[[bytes], Awaitable[bytes]] | None = None


@attrs.define(kw_only=True, eq=False)
class Stream(Ending, Generic[_E]):
    """Typed events, and the writer that makes JSON of them.

    Attributes:
        source: what is sent.
        writer: how it is written.
        pings: what is sent in silence.
        on_error: writes an error that comes later.
        first: the events that have been taken.
    """

    source: EventSource[_E]
    writer: sse.EventWriter[_E]
    pings: Pings
    on_error: OnError
    first: list[tuple[int, _E]] = attrs.field(factory=list)

    async def write(self) -> AsyncIterable[bytes]:
        return self._written()

    async def begin(self, *, tells_start: bool) -> None:
        """Wait for the first event, but no longer than until the first ping, so that an error
        before any output still sets the status.

        Args:
            tells_start: the client wants to know when its prompt is begun.

        Raises:
            TrioServeError: the request failed before it had any output.
        """
        pings = self.pings
        if pings.tell_place:
            with trio.move_on_after(sse.SOON):
                await self._take_first(tells_start=tells_start)
        if not (self._has_begun() or (pings.tell_place and pings.is_queued())):
            with trio.move_on_after(pings.interval):
                await self._take_first(tells_start=tells_start)

    async def _take_first(self, *, tells_start: bool) -> None:
        """Take events until one of them is worth sending.

        That a prompt or a step starts is not: it may still fail. The start of a step is kept, and
        sent with what follows.
        """
        while not self._has_begun():
            index, event = await self.source.next()
            starts = isinstance(event, Progress) and event.processed == event.cached
            if tells_start or not starts:
                self.first.append((index, event))

    def has_output(self) -> bool:
        """True once a part of the output has come."""
        return self._has_begun() and not isinstance(self.first[-1][1], Progress)

    def _has_begun(self) -> bool:
        return bool(self.first) and not isinstance(self.first[-1][1], StepStarted)

    async def _written(self) -> AsyncGenerator[bytes, None]:
        # An async generator, so no nursery or cancel scope may be open at a `yield`.
        writer, first, running = self.writer, self.first, self.source.n_streams
        try:
            said = b""
            while not self._has_begun():
                if (comment := await writer.comment(self.pings)) != said:
                    yield comment
                said = comment
                with trio.move_on_after(self.pings.pause()):
                    await self._take_first(tells_start=True)
            while running:
                index, event = first.pop(0) if first else await self.source.next()
                is_last = isinstance(event, Finished | RunEnded | Summary)
                if is_last:
                    await writer.settle(event)
                if _is_long(event):
                    data = await trio.to_thread.run_sync(writer.encode, index, event)
                else:
                    data = writer.encode(index, event)
                if is_last:
                    running -= 1
                    data += b"" if running else writer.end()
                if running and data:
                    yield data
        except Exception as error:  # the status is sent: an event has to say it
            data, self.failure = self.on_error(error), error
        yield Last(data if self.at_end is None else await self.at_end(data))


async def stream(
    source: EventSource[_E],
    writer: sse.EventWriter[_E],
    pings: Pings,
    on_error: OnError,
    *,
    tells_start: bool = False,
) -> Stream[_E]:
    """Answer with events; see `Stream`, and of the arguments `Stream.begin`.

    Raises:
        TrioServeError: the request failed before it had any output.
    """
    reply = Stream(
        source=source,
        writer=writer,
        pings=pings,
        on_error=on_error,
        headers=dict(sse.HEADERS),
        content_type=writer.content_type,
        keep_alive=KeepAlive(pings.interval, partial(writer.comment, pings)),
    )
    await reply.begin(tells_start=tells_start)
    return reply


def _is_long(event: object) -> bool:
    """Judge if writing an event takes more than a few milliseconds."""
    if isinstance(event, RunEnded):
        event = event.answer.finished
    if isinstance(event, Chunk | ChatChunk):
        return bool(event.probs) and sse.n_candidates(event.probs) > _MANY_CANDIDATES
    if not isinstance(event, Finished):
        return False
    return event.timings.prompt_n + event.timings.cache_n > _MANY_TOKENS  # some routes repeat them
