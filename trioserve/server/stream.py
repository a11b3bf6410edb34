"""The results of `Server`: a stream of events, or the whole output."""

from __future__ import annotations

import itertools
import math
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import attrs
import trio

from trioserve.chat.deltas import ContentDelta, Delta, Message, MessageBuilder
from trioserve.chat.parse.message import MessageParser
from trioserve.concurrency import all_of
from trioserve.errors import RequestEndedError, TrioServeError
from trioserve.server.dispatch import UNREAD_BYTES, Mailbox, size_of
from trioserve.server.limits.memory import MemoryReservation
from trioserve.types import (
    CancelReason,
    Chunk,
    Event,
    Failed,
    Finished,
    Progress,
    Prompt,
    PromptScores,
    Sound,
    TokenId,
    TokenProbs,
)

_T = TypeVar("_T")
_Whole = TypeVar("_Whole", covariant=True)


@attrs.frozen(kw_only=True)
class Completion:
    """The whole output of a completion."""

    text: str
    tokens: tuple[TokenId, ...]
    probs: tuple[TokenProbs, ...]
    prompt: Prompt
    finished: Finished
    #: Of the tokens of the prompt, if they were asked for.
    scores: PromptScores | None = None


@attrs.frozen(kw_only=True)
class ChatCompletion:
    """The whole output of a chat."""

    message: Message
    tokens: tuple[TokenId, ...]
    probs: tuple[TokenProbs, ...]
    prompt: Prompt
    prompt_text: str
    finished: Finished
    #: The parts of the message with the candidates for their tokens; empty without candidates.
    chunks: tuple[ChatChunk, ...] = ()
    scores: PromptScores | None = None  # as in `Completion`


#: Factor on `size_of` for candidates in a response that is written at its end. It exists as
#: objects, text and bytes for a moment.
_KEPT = 2


class Source(Protocol):
    """Fills the mailboxes of streams: a `Dispatcher`, or the connection to one."""

    def resume(self, mailbox: Mailbox) -> None:
        """Resume the task of a mailbox whose events were taken."""

    def end(self, mailbox: Mailbox, error: TrioServeError, reason: CancelReason) -> None:
        """Cancel a task; the reader gets `error`."""


class Stream:
    """The output of one request, as it arrives: `Chunk`, and `Progress` if that was asked for.

    Iterate over it within the block that opened it; `finished` is set when the iteration ends.
    Pending chunks are merged into one, unless they are paced: a paced chunk arrives when it is due.
    Cancelling an iteration loses no events; leaving the block cancels the request.

    Raises:
        TrioServeError: from the iteration, when the request fails or is ended by the server.
    """

    def __init__(
        self, prompt: Prompt, mailbox: Mailbox, source: Source, held: MemoryReservation
    ) -> None:
        self.prompt = prompt
        self.finished: Finished | None = None
        #: Of the tokens of the prompt, once they have been read, if they were asked for.
        self.scores: PromptScores | None = None
        #: The text read so far, in pieces, for readers that need it at the end.
        self.texts: list[str] | None = None
        self.mailbox, self.task_id = mailbox, mailbox.task_id
        self._source = source
        self._held = held
        self._unread: list[Event] = []  # reversed: the next one is last
        self._due = -math.inf
        #: True if to wait until each chunk is due. Not needed to read the whole output.
        self.is_paced = True

    def __aiter__(self) -> AsyncIterator[Progress | Chunk]:
        return self

    async def __anext__(self) -> Progress | Chunk:
        event = await self.next_event()
        if isinstance(event, Finished):
            raise StopAsyncIteration
        return event

    def text(self) -> AsyncIterator[str]:
        """Iterate over the text alone."""
        return (event.text async for event in self if isinstance(event, Chunk) and event.text)

    async def next_event(self) -> Progress | Chunk | Finished:
        """Wait for the next event. The last one is `Finished`. Raises as the iteration."""
        if self.finished is not None:
            return self.finished
        if not self._unread:
            await self.mailbox.wait()
            self._take()
        event = self._unread[-1]
        if self.is_paced and isinstance(event, Chunk) and event.pace:
            await self._wait_until_due()
            event = self._unread[-1]
        if isinstance(event, Failed):  # it stays unread, to be raised again
            raise event.error.again()
        assert not isinstance(event, Sound)  # that is of another kind of task
        self._unread.pop()
        if isinstance(event, Finished):
            self.finished = event
        elif isinstance(event, Chunk):
            self.scores = self.scores if event.scores is None else event.scores
            if self.texts is not None:
                self.texts.append(event.text)
        return event

    def take(self) -> list[Event]:
        """Take all events that have come, for one who passes them on. Raises as the iteration."""
        events = self.mailbox.take_all()
        self._source.resume(self.mailbox)
        if self.texts is not None:
            self.texts += (each.text for each in events if isinstance(each, Chunk))
        if events and isinstance(events[-1], Finished):
            self.finished = events[-1]
        return events

    def _take(self) -> None:
        events = self.mailbox.take_all()
        if self._unread:
            events = [*reversed(self._unread), *events]
        self._source.resume(self.mailbox)
        if len(events) > 1:
            events = _merge(events, is_paced=self.is_paced)
            events.reverse()
        self._unread = events

    async def _wait_until_due(self) -> None:
        """Wait until a chunk is due, and take the events that arrive meanwhile."""
        due = max(self._due, trio.current_time())
        if due == self._due:
            await trio.sleep_until(due)
            if not self.mailbox.is_empty:
                self._take()
        # Not from now: waking up late would add up.
        self._due = due + _pace(self._unread[-1])

    def cancel(self, reason: CancelReason = CancelReason.CALLER) -> None:
        """End the request from another task; its reader gets a `RequestEndedError`."""
        error = RequestEndedError("The request was cancelled.")
        self._source.end(self.mailbox, error, reason)

    def keep(self, probs: Sequence[TokenProbs]) -> None:
        """Reserve memory for candidates that are kept until the end.

        Raises:
            MemoryFullError: the memory budget has no room for them.
            PayloadTooLargeError: they exceed what one request may hold.
        """
        if probs:
            self._held.grow(_KEPT * size_of(probs))

    async def read(self) -> Completion:
        """Read to the end. Raises what the iteration and `keep` raise."""
        chunks, rest = await _read(self, self)
        return Completion(text="".join(chunk.text for chunk in chunks), **rest)


async def _read(
    events: AsyncIterator[Chunk | ChatChunk | Progress], stream: Stream
) -> tuple[list[Any], dict[str, Any]]:
    """Read to the end. Returns the chunks, and the fields that all outputs have."""
    stream.is_paced = False
    chunks = []
    async for event in events:
        if isinstance(event, Chunk | ChatChunk):
            stream.keep(event.probs)
            chunks.append(event)
    return chunks, {
        "tokens": tuple(itertools.chain.from_iterable(chunk.tokens for chunk in chunks)),
        "probs": tuple(itertools.chain.from_iterable(chunk.probs for chunk in chunks)),
        "prompt": stream.prompt,
        "finished": stream.finished,
        "scores": stream.scores,
    }


#: Number of chunks that may wait until they are due. With more, the reader is late anyway.
_MAX_PACED = 16
#: Paced chunks leave together, at most this many seconds of them: each event costs time.
_JOINED_S = 0.005


def _pace(event: Event) -> float:
    return event.pace if isinstance(event, Chunk) else 0.0


def _merge(events: list[Event], *, is_paced: bool = False) -> list[Event]:
    """Join adjacent chunks, up to `UNREAD_BYTES`.

    Chunks with candidates or scores stay separate: one event for each token, as in llama-server.
    While the last chunk is paced, at most `_JOINED_S` of paced chunks are joined.
    """
    is_paced = is_paced and len(events) <= _MAX_PACED and bool(_pace(events[-1]))
    merged: list[Event] = []
    chunks: list[Chunk] = []
    n_bytes, joined_s = 0, 0.0
    for event in events:
        joins = isinstance(event, Chunk) and not (event.probs or event.scores is not None)
        pace = _pace(event) if is_paced else 0.0
        is_due_later = bool(pace) and joined_s + pace > _JOINED_S
        if chunks and (n_bytes >= UNREAD_BYTES or not joins or is_due_later):
            merged.append(_join(chunks, joined_s))
            chunks, n_bytes, joined_s = [], 0, 0.0
        if isinstance(event, Chunk) and joins:
            chunks.append(event)
            n_bytes += len(event.text)
            joined_s += pace
        else:
            merged.append(event)
    return [*merged, _join(chunks, joined_s)] if chunks else merged


_TEXT, _TOKENS, _PROBS, _DRAFTS = map(attrgetter, ("text", "tokens", "probs", "drafts"))


def _join(chunks: list[Chunk], pace: float) -> Chunk:
    return Chunk(
        chunks[0].task_id,
        "".join(map(_TEXT, chunks)),
        tuple(itertools.chain.from_iterable(map(_TOKENS, chunks))),
        tuple(itertools.chain.from_iterable(map(_PROBS, chunks))),
        pace,
        drafts=max(map(_DRAFTS, chunks)),
    )


@attrs.frozen
class ChatChunk:
    """New parts of a message, and the tokens they came from."""

    deltas: tuple[Delta, ...]
    tokens: tuple[TokenId, ...]
    probs: tuple[TokenProbs, ...] = ()
    drafts: tuple[int, int] = (0, 0)  # as in `Chunk`


class ChatStream:
    """Like `Stream`, with the output parsed into content, reasoning and tool calls.

    `prompt_text` is the rendered prompt.
    """

    def __init__(
        self,
        stream: Stream,
        parser: MessageParser,
        prompt_text: str,
        end_thinking: Callable[[], Awaitable[bool]],
    ) -> None:
        self.stream = stream
        self.prompt, self.mailbox, self.task_id = stream.prompt, stream.mailbox, stream.task_id
        self.prompt_text = prompt_text
        self._parser = parser
        self._end_thinking = end_thinking
        self._deltas: list[Delta] = []  # all that were read
        self._last: Finished | None = None  # delivered after what the parser held back

    @property
    def finished(self) -> Finished | None:
        """The last event, once it has been read."""
        return self.stream.finished if self._last is None else None

    @property
    def message(self) -> Message:
        """The message as far as it has been read."""
        builder = MessageBuilder()
        for delta in self._deltas:
            builder.add(delta)
        return builder.build()

    def __aiter__(self) -> AsyncIterator[Progress | ChatChunk]:
        return self

    async def __anext__(self) -> Progress | ChatChunk:
        event = await self.next_event()
        if isinstance(event, Finished):
            raise StopAsyncIteration
        return event

    def text(self) -> AsyncIterator[str]:
        """Iterate over the text of the message alone, without reasoning and tool calls."""
        return (
            delta.text
            async for event in self
            if isinstance(event, ChatChunk)
            for delta in event.deltas
            if isinstance(delta, ContentDelta)
        )

    async def next_event(self) -> Progress | ChatChunk | Finished:
        """Wait for the next event. The last one is `Finished`. Raises as the iteration."""
        if self._last is not None:
            last, self._last = self._last, None
            return last
        event = await self.stream.next_event()
        if isinstance(event, Chunk):
            return self._chunk(self._parser.feed(event.text), event)
        if isinstance(event, Finished) and (deltas := self._parser.finish()):
            self._last = event
            return self._chunk(deltas, None)
        return event

    def _chunk(self, deltas: list[Delta], came_from: Chunk | None) -> ChatChunk:
        self._deltas += deltas
        if came_from is None:
            return ChatChunk(tuple(deltas), ())
        return ChatChunk(tuple(deltas), came_from.tokens, came_from.probs, came_from.drafts)

    async def end_reasoning(self) -> bool:
        """End the reasoning now, if it is in progress. May be cancelled.

        Returns whether that was possible: the answer still runs, the model supports reasoning, and
        `reasoning_control` or a budget was set.

        Raises:
            ServerClosingError: the server is closed.
        """
        return await self._end_thinking()

    def cancel(self) -> None:
        """End the request from another task; its reader gets a `RequestEndedError`."""
        self.stream.cancel()

    async def read(self) -> ChatCompletion:
        """Read to the end. The message includes what was read before."""
        chunks, rest = await _read(self, self.stream)
        rest["chunks"] = tuple(chunks) if rest["probs"] else ()
        return ChatCompletion(message=self.message, prompt_text=self.prompt_text, **rest)


class _Readable(Protocol[_Whole]):
    async def read(self) -> _Whole: ...


async def read_all(
    opened: AbstractAsyncContextManager[Sequence[_Readable[_T]]],
) -> list[_T]:
    """Read streams to their ends concurrently: ``await read_all(server.stream_all(...))``.

    Raises:
        TrioServeError: one of them failed; the others are cancelled.
    """
    async with opened as streams:
        return await all_of([stream.read for stream in streams])
