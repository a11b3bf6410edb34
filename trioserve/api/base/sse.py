"""Writes server-sent events, and makes responses of token streams."""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any, ClassVar, Generic, TypeAlias, TypeVar

import attrs
import msgspec
import trio
from msgspec import UNSET
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.connection import PING, KeepAlive, Request
from trioserve.concurrency import Feed, alongside
from trioserve.errors import TrioServeError
from trioserve.server.dispatch import Mailbox
from trioserve.server.generation.requests import Queue
from trioserve.server.runs.events import RunEnded, RunEvent, StepStarted
from trioserve.server.stream import ChatChunk, ChatStream, Stream
from trioserve.server.transcription.transcript import Summary, TranscriptEvent
from trioserve.types import Chunk, Finished, Progress, TokenProbs, WaitingStatus

Event: TypeAlias = Progress | Chunk | ChatChunk | Finished

_E = TypeVar("_E", bound=Event | RunEvent | TranscriptEvent)
_Told = TypeVar("_Told", contravariant=True)


class LazyList(Sequence[Any]):
    """A JSON list that makes each item when it is written, and does not keep it.

    Args:
        write: makes an item from a value.
        values: the values of the items.
    """

    def __init__(self, write: Callable[[Any], Any], values: Sequence[Any]) -> None:
        self._write, self._values = write, values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self._write(value) for value in self._values[index]]
        return self._write(self._values[index])


def _list_of(value: Any) -> list[Any]:
    if isinstance(value, LazyList):
        return list(value)
    raise TypeError(f"{value!r} has no form in JSON")


#: Makes JSON without spaces; characters beyond ASCII stay as they are.
encode: Callable[[Any], str] = json.JSONEncoder(
    ensure_ascii=False,
    separators=(",", ":"),
    allow_nan=False,
    default=partial(msgspec.to_builtins, enc_hook=_list_of),
).encode


def fields_of(value: msgspec.Struct) -> dict[str, Any]:
    """The fields of an answer, by their names in JSON."""
    config, names = value.__struct_config__, value.__struct_encode_fields__
    fields = zip(names, msgspec.structs.astuple(value), strict=True)
    tag = {config.tag_field: config.tag} if config.tag_field else {}
    return tag | {name: one for name, one in fields if one is not UNSET}


#: Items of a list that are written at once: numbers, and others.
_NUMBERS_AT_ONCE = 4096
_ITEMS_AT_ONCE = 8


def encode_in_steps(value: Any, depth: int = 6) -> Iterator[str]:
    """Make the same JSON in pieces, so that other threads can run in between."""
    if isinstance(value, msgspec.Struct):
        value = fields_of(value)
    if depth and isinstance(value, dict):
        comma = ""
        yield "{"
        for name, inner in value.items():
            yield f"{comma}{encode(name)}:"
            yield from encode_in_steps(inner, depth - 1)
            comma = ","
        yield "}"
    elif depth and isinstance(value, list | tuple | LazyList):
        are_numbers = bool(value) and isinstance(value[0], int)
        at_once = _NUMBERS_AT_ONCE if are_numbers else _ITEMS_AT_ONCE
        if not are_numbers and len(value) <= 2 * at_once:
            yield f"[{','.join(''.join(encode_in_steps(each, depth - 1)) for each in value)}]"
            return
        comma = "["
        for start in range(0, len(value), at_once):
            yield comma + encode(value[start : start + at_once])[1:-1]
            comma = ","
        yield "]"
    else:
        yield encode(value)


#: The last event of OpenAI's streams.
DONE = b"data: [DONE]\n\n"

#: Candidates, and tokens of a prompt, that are written on the event loop: it takes about 1 ms.
_MANY_CANDIDATES = 256
_MANY_TOKENS = 16384

CONTENT_TYPE = "text/event-stream"

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(payload: Any) -> bytes:
    """Write one event."""
    return f"data: {encode(payload)}\n\n".encode()


class EventWriter(ABC, Generic[_Told]):
    """Writes the events of a response as bytes."""

    content_type: ClassVar[str] = CONTENT_TYPE

    @abstractmethod
    def encode(self, index: int, event: _Told) -> bytes:
        """Write an event of stream number `index`; empty if there is nothing to send."""

    def end(self) -> bytes:
        """Write what follows the last event of all streams."""
        return b""

    async def comment(self, pings: Pings) -> bytes:
        """Write the ping for a client that has waited in silence."""
        return await pings.comment()


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
    resources: AsyncExitStack, streams: Sequence[Stream | ChatStream]
) -> EventSource[Event]:
    """Make the source of several streams, which `resources` keeps running."""
    if len(streams) == 1:
        return EventSource.of(streams[0].next_event)
    # Room for one: if the client does not read, tokens must stay in the mailboxes, as these are
    # watched.
    events: Feed[tuple[int, Event]] = Feed(size=1)

    async def pump(index: int, stream: Stream | ChatStream) -> None:
        try:
            event: Event | None = None
            while not isinstance(event, Finished):
                event = await stream.next_event()
                await events.room()
                events.put((index, event))
        except TrioServeError as error:
            events.end(error)

    pumps = [partial(pump, index, stream) for index, stream in enumerate(streams)]
    await resources.enter_async_context(alongside(*pumps))
    return EventSource(len(streams), events.__anext__)


#: Turns an error that ends a response which had begun into bytes.
OnError: TypeAlias = Callable[[Exception], bytes]


async def respond(
    request: Request,
    source: EventSource[_E],
    writer: EventWriter[_E],
    pings: Pings,
    on_error: OnError,
    *,
    tells_start: bool = False,
) -> Response:
    """Make the response that streams events.

    Waits for the first event, but no longer than until the first ping, so that an error before
    any output still sets the status.

    Args:
        request: the current one.
        source: what is sent.
        writer: how it is written.
        pings: what is sent in silence.
        on_error: writes an error that comes later.
        tells_start: the client wants to know when its prompt is begun.

    Raises:
        TrioServeError: the request failed before it had any output.
    """
    first: list[tuple[int, _E]] = []
    if pings.tell_place:
        with trio.move_on_after(SOON):
            await _take_first(source, first, tells_start=tells_start)
    if not (_has_begun(first) or (pings.tell_place and pings.is_queued())):
        with trio.move_on_after(pings.interval):
            await _take_first(source, first, tells_start=tells_start)
    request.keep_alive = KeepAlive(pings.interval, partial(writer.comment, pings))
    body = _write(source, writer, pings, on_error, first)
    return Response(body, headers=HEADERS, content_type=writer.content_type)


async def _take_first(
    source: EventSource[_E], first: list[tuple[int, _E]], *, tells_start: bool
) -> None:
    """Take events until one of them is worth sending.

    That a prompt or a step starts is not: it may still fail. The start of a step is kept, and sent
    with what follows.
    """
    while not _has_begun(first):
        index, event = await source.next()
        starts = isinstance(event, Progress) and event.processed == event.cached
        if tells_start or not starts:
            first.append((index, event))


def _has_begun(first: Sequence[tuple[int, Any]]) -> bool:
    return bool(first) and not isinstance(first[-1][1], StepStarted)


def _is_long(event: Event | RunEvent | TranscriptEvent) -> bool:
    """Whether writing an event takes more than a few milliseconds."""
    if isinstance(event, RunEnded):
        event = event.answer.finished
    if isinstance(event, Chunk | ChatChunk):
        return bool(event.probs) and n_candidates(event.probs) > _MANY_CANDIDATES
    return isinstance(event, Finished) and n_prompt_of(event) > _MANY_TOKENS


def n_candidates(probs: Sequence[TokenProbs]) -> int:
    """Count the candidates that are reported for tokens."""
    return sum(1 + len(each.top) for each in probs)


def n_prompt_of(event: Finished) -> int:
    """Count the tokens of a prompt: some routes repeat it at the end."""
    return event.timings.prompt_n + event.timings.cache_n


async def _write(
    source: EventSource[_E],
    writer: EventWriter[_E],
    pings: Pings,
    on_error: OnError,
    first: list[tuple[int, _E]],
) -> AsyncGenerator[bytes, None]:
    # An async generator, so no nursery or cancel scope may be open at a `yield`.
    running = source.n_streams
    try:
        said = b""
        while not _has_begun(first):
            if (comment := await writer.comment(pings)) != said:
                yield comment
            said = comment
            with trio.move_on_after(pings.pause()):
                await _take_first(source, first, tells_start=True)
        while running:
            index, event = first.pop(0) if first else await source.next()
            if _is_long(event):
                data = await trio.to_thread.run_sync(writer.encode, index, event)
            else:
                data = writer.encode(index, event)
            if isinstance(event, Finished | RunEnded | Summary):
                running -= 1
                data += b"" if running else writer.end()
            if data:
                yield data
    except Exception as error:  # the status is sent: an event has to say it
        yield on_error(error)


# -- what keeps a silent stream alive


#: Seconds before a stream reports its place in the queue for the first time, and between two
#: looks. A request that gets a slot at once has nothing to report.
SOON = 0.1
LOOK_INTERVAL = 1.0

#: Seconds that a look may take. The engine answers between two steps, and a ping should not wait.
LOOK_TIMEOUT = 1.0


@attrs.frozen
class Pings:
    """What a response sends while its streams, which have these mailboxes, are silent.

    `interval` is the number of silent seconds before a ping; infinite: no pings. With
    `tell_place`, the response reports the place in the queue soon, and again after each change.
    """

    interval: float
    queue: Queue | None = None
    mailboxes: Sequence[Mailbox] = ()
    tell_place: bool = False

    def is_queued(self) -> bool:
        """Whether none of the streams has a slot yet."""
        return self.queue is not None and all(mailbox.queued for mailbox in self.mailboxes)

    def pause(self) -> float:
        """Seconds until the next comment, for as long as nothing else was sent."""
        return LOOK_INTERVAL if self.tell_place and self.is_queued() else math.inf

    async def comment(self) -> bytes:
        """Write a comment for a silent stream: its place in the queue, or just a ping."""
        if self.queue is not None and self.is_queued():
            with trio.move_on_after(LOOK_TIMEOUT):
                place = await self.queue.first_of([each.task_id for each in self.mailboxes])
                if place is not None:
                    return comment_on(place)
        return PING


def comment_on(place: WaitingStatus) -> bytes:
    """Write a place as a comment, with the estimated wait where there is one."""
    about = "" if place.wait_s is None else f", about {place.wait_s:.1f} s"
    return f": queued, position {place.position}{about}\n\n".encode()
