"""What goes through the pipes between a server and the process that decodes for it.

Messages and data, each with its length before it. Nothing that is read is executed, as a pickle
would be: the process reads the files of strangers, and may be theirs.
"""

from __future__ import annotations

import json
import struct
from typing import IO, Any

_HEAD = struct.Struct(">cQ")
_MESSAGE, _DATA = b"m", b"d"
_MAX_MESSAGE = 2**16


class PipeError(Exception):
    """The other side has ended, or says what makes no sense."""


def write_message(stream: IO[bytes], message: dict[str, Any]) -> None:
    """Write a message. Raises OSError."""
    data = json.dumps(message).encode()
    stream.write(_HEAD.pack(_MESSAGE, len(data)) + data)


def write_data(stream: IO[bytes], data: bytes) -> None:
    """Write data. Raises OSError."""
    stream.write(_HEAD.pack(_DATA, len(data)))
    stream.write(data)


def read(stream: IO[bytes], most: int) -> dict[str, Any] | bytes:
    """Read a message, or data of at most so many bytes.

    Raises:
        PipeError: there is nothing more, or it is too long, or makes no sense.
    """
    kind, length = _HEAD.unpack(_read_exactly(stream, _HEAD.size))
    if length > (_MAX_MESSAGE if kind == _MESSAGE else most):
        raise PipeError(f"{length} bytes are too many")
    data = _read_exactly(stream, length)
    if kind == _DATA:
        return data
    try:
        message = json.loads(data)
    except (ValueError, RecursionError):
        message = None
    if kind != _MESSAGE or not isinstance(message, dict):
        raise PipeError("no message")
    return message


def _read_exactly(stream: IO[bytes], length: int) -> bytes:
    data = stream.read(length)
    if len(data) < length:
        raise PipeError("the other side has ended")
    return data
