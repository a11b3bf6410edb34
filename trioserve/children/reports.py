"""The reports of the process of a model, each in a frame.

The process may be in a stranger's hands: what it sends is checked by these types.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeAlias

import msgspec
from msgspec import Meta, Struct

from trioserve.children.frames import FrameError

#: Characters of a message; `Failed.of` cuts it.
_MAX_MESSAGE = 2**16

#: The first argument of a process that has a model and answers calls, in place of HTTP.
MODEL = "model"

#: Begins its second argument with the path of a Unix socket: those who connect to it ask, too.
AT = "at="

#: The first argument of a process that sends `Estimated`, and exits.
ESTIMATE = "estimate"

#: Begins its argument with the bytes of RAM that other models would free.
BESIDE = "beside="

_Count: TypeAlias = Annotated[int, Meta(ge=0)]
_Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]


class _Report(Struct, frozen=True, tag=str.lower, tag_field="state"):
    @property
    def state(self) -> str:
        """The name of the state."""
        return type(self).__name__.lower()


class Downloading(_Report, frozen=True):
    """The model is downloaded, to this share."""

    progress: _Share


class Loading(_Report, frozen=True):
    """The model is loaded, to this share."""

    progress: _Share


class Ready(_Report, frozen=True):
    """The model is in memory."""


class Sleeping(_Report, frozen=True):
    """The model is unloaded until the next request."""


class Draining(_Report, frozen=True):
    """No new request is taken, and the process will end."""


class KeyUsage(Struct, frozen=True, array_like=True):
    """The usage of an API key on a day; see `trioserve.store.usage`."""

    day: str
    key: str
    requests: _Count
    input_tokens: _Count
    cached_input_tokens: _Count
    output_tokens: _Count
    seconds: Annotated[float, Meta(ge=0)]


class Usage(_Report, frozen=True):
    """The usage of API keys since the last such report."""

    rows: Sequence[KeyUsage]


class Failed(_Report, frozen=True):
    """Why the process will end."""

    message: Annotated[str, Meta(max_length=_MAX_MESSAGE)]

    @classmethod
    def of(cls, message: str) -> Failed:
        """Make a report of a message, whose end may be cut off."""
        return cls(message[:_MAX_MESSAGE])


class Logged(_Report, frozen=True):
    """A line of the log, by its fields."""

    fields: dict[str, str | int | float | bool | None]

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Logged:
        """Make a line. What is no text or number is written as Python shows it."""
        return cls({str(name): _plain(value) for name, value in fields.items()})


def _plain(value: object) -> str | int | float | bool | None:
    if isinstance(value, str):
        return value if value.isascii() else value.encode(errors="backslashreplace").decode()
    if isinstance(value, int):
        return value if abs(value) < 2**63 else str(value)
    return value if isinstance(value, float | None) else _plain(repr(value))


class Estimated(_Report, frozen=True):
    """Bytes that a model would need: in RAM, or on all devices together, and on each GPU.

    `free_gpus` is what was free on each.
    """

    need: _Count
    gpus: tuple[_Count, ...] = ()
    free_gpus: tuple[_Count, ...] = ()


Report: TypeAlias = (
    Downloading | Loading | Ready | Sleeping | Draining | Usage | Logged | Failed | Estimated
)

_decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)


def decode(payload: bytes) -> Report:
    """Read a report.

    Raises:
        FrameError: the payload is no report.
    """
    try:
        return _decoder.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise FrameError(f"what it reports is not understood: {error}") from None
