"""Frames: messages of bytes on a socket, each with its length before it."""

from __future__ import annotations

from collections import deque
from struct import Struct
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import trio

#: Bytes of the payload of a frame, unless its reader allows another number.
MAX_FRAME = 2**26

_LENGTH = Struct("<I")
_CHUNK = 2**18


class FrameError(Exception):
    """The other side sent what is no frame, or one that is too long."""


def framed(payload: bytes) -> bytes:
    """Make the frame of a payload."""
    return head(payload) + payload


def head(payload: bytes) -> bytes:
    """Make what is sent before a payload, which need not be copied then."""
    return _LENGTH.pack(len(payload))


class FrameReader:
    """Finds the frames in what a socket gives. It reads nothing itself.

    Args:
        max_bytes: of a payload.
    """

    def __init__(self, max_bytes: int = MAX_FRAME) -> None:
        self._max_bytes = max_bytes
        self._held = bytearray()

    @property
    def is_partial(self) -> bool:
        """Whether it holds bytes of a frame whose end has not come."""
        return bool(self._held)

    def feed(self, data: bytes | bytearray) -> list[bytes]:
        """Take more bytes; returns the payloads of the frames that are complete.

        Raises:
            FrameError: a frame is too long. Whatever follows raises it again.
        """
        if self._held:
            self._held += data
            data = self._held
        payloads: list[bytes] = []
        begin, size = 0, len(data)
        with memoryview(data) as view:
            while size - begin >= _LENGTH.size:
                (length,) = _LENGTH.unpack_from(view, begin)
                if length > self._max_bytes:
                    self._held = bytearray(view[begin : begin + _LENGTH.size])
                    raise FrameError(f"a frame of {length:,} bytes is too long")
                end = begin + _LENGTH.size + length
                if end > size:
                    break
                payloads.append(bytes(view[begin + _LENGTH.size : end]))
                begin = end
        if data is self._held:
            del self._held[:begin]
        else:
            self._held += data[begin:]
        return payloads


class FrameStream:
    """Frames on a stream of Trio. One task may send, and another receive.

    Args:
        stream: the stream.
        max_bytes: of a payload that is received.
    """

    def __init__(self, stream: trio.abc.Stream, max_bytes: int = MAX_FRAME) -> None:
        self._stream = stream
        self._reader = FrameReader(max_bytes)
        self._payloads = deque[bytes]()

    async def send(self, payload: bytes) -> None:
        """Send a frame. If that is cancelled, no other can be sent."""
        await self._stream.send_all(head(payload))
        await self._stream.send_all(payload)

    async def receive(self) -> bytes | None:
        """The payload of the next frame; None: there is none. An incomplete frame is ignored.

        Raises:
            FrameError: this is no frame.
        """
        while not self._payloads:
            if not (data := await self._stream.receive_some(_CHUNK)):
                return None
            self._payloads += self._reader.feed(data)
        return self._payloads.popleft()
