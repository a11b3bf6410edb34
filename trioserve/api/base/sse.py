"""Writes JSON and server-sent events, and what keeps a silent stream alive."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

import msgspec
from msgspec import UNSET

from trioserve.server.compaction import CompactedEvent
from trioserve.server.runs.events import RunEvent
from trioserve.server.speech.speech import SpeechEvent
from trioserve.server.stream import ChatChunk
from trioserve.server.transcription.transcript import TranscriptEvent
from trioserve.types import Chunk, Finished, Progress, TokenProbs, WaitingStatus

if TYPE_CHECKING:
    from trioserve.api.base.reply import Pings

Event: TypeAlias = Progress | Chunk | ChatChunk | Finished

_E = TypeVar("_E", bound=Event | RunEvent | TranscriptEvent | SpeechEvent | CompactedEvent)
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

CONTENT_TYPE = "text/event-stream"

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event(payload: Any) -> bytes:
    """Write one event. What is no Unicode in it is replaced."""
    return f"data: {encode(payload)}\n\n".encode(errors="replace")


class EventWriter(ABC, Generic[_Told]):
    """Writes the events of a response as bytes."""

    content_type: ClassVar[str] = CONTENT_TYPE

    @abstractmethod
    def encode(self, index: int, event: _Told) -> bytes:
        """Write an event of stream number `index`; empty if there is nothing to send."""

    async def settle(self, event: _Told) -> None:
        """Get what is needed to write the last event of a stream."""

    def end(self) -> bytes:
        """Write what follows the last event of all streams."""
        return b""

    async def comment(self, pings: Pings) -> bytes:
        """Write the ping for a client that has waited in silence."""
        return await pings.comment()


def n_candidates(probs: Sequence[TokenProbs]) -> int:
    """Count the candidates that are reported for tokens."""
    return sum(1 + len(each.top) for each in probs)


# -- what keeps a silent stream alive


#: A comment, which clients skip. It keeps proxies from closing a silent connection.
PING = b":\n\n"

#: Seconds before a stream reports its place in the queue for the first time, and between two
#: looks. A request that gets a slot at once has nothing to report.
SOON = 0.1
LOOK_INTERVAL = 1.0

#: Seconds that a look may take. The engine answers between two steps, and a ping should not wait.
LOOK_TIMEOUT = 1.0


def comment_on(place: WaitingStatus) -> bytes:
    """Write a place as a comment, with the estimated wait where there is one."""
    about = "" if place.wait_s is None else f", about {place.wait_s:.1f} s"
    return f": queued, position {place.position}{about}\n\n".encode()
