"""Frames: messages of bytes on a socket, each with its length before it."""

from __future__ import annotations

import socket
from collections import deque
from struct import Struct

import trio

#: Bytes of the payload of a frame, unless its reader allows another number.
MAX_FRAME = 2**26

_LENGTH = Struct("<I")
_CHUNK = 2**18

#: Windows has none, so sockets that Trio waits for are set not to block, too.
_DONTWAIT = getattr(socket, "MSG_DONTWAIT", 0)


class FrameError(Exception):
    """The other side sent what is no frame, or one that is too long."""


def framed(payload: bytes) -> bytes:
    """Make the frame of a payload."""
    return head(payload) + payload


def head(payload: bytes) -> bytes:
    """Make what is sent before a payload, which need not be copied then."""
    return _LENGTH.pack(len(payload))


class FrameReader:
    """Finds the frames in what a socket gives. It reads nothing itself."""

    def __init__(self, max_bytes: int = MAX_FRAME) -> None:
        self._max_bytes = max_bytes
        self._held = bytearray()

    @property
    def is_partial(self) -> bool:
        """True if it holds bytes of a frame whose end has not come."""
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


async def receive(connection: socket.socket) -> bytes:
    """Wait for bytes on a socket; none: the other side has gone.

    `trio.SocketStream` would first try to read, and wait then, which costs more.
    """
    while True:
        await trio.lowlevel.wait_readable(connection)
        try:
            return connection.recv(_CHUNK, _DONTWAIT)
        except BlockingIOError:
            continue
        except ConnectionResetError:  # it has gone without reading all
            return b""


async def send(connection: socket.socket, data: bytes) -> bool:
    """Send bytes on a socket. Returns False if the other side has gone."""
    with memoryview(data) as view:
        n_sent = 0
        while n_sent < len(view):
            try:
                n_sent += connection.send(view[n_sent:], _DONTWAIT)
            except BlockingIOError:
                await trio.lowlevel.wait_writable(connection)
            except OSError:
                return False
    return True


class FrameStream:
    """Frames on a socket, for Trio. One task may send, and another receive.

    Args:
        max_bytes: of a payload that is received.
    """

    def __init__(self, connection: socket.socket, max_bytes: int = MAX_FRAME) -> None:
        connection.setblocking(False)
        self._connection = connection
        self._reader = FrameReader(max_bytes)
        self._payloads = deque[bytes]()

    async def send(self, payload: bytes) -> bool:
        """Send a frame. Returns False if the other side has gone.

        If it is cancelled, no other frame can be sent.
        """
        if len(payload) <= _CHUNK:
            return await send(self._connection, framed(payload))
        return await send(self._connection, head(payload)) and await send(self._connection, payload)

    async def receive(self) -> bytes | None:
        """The payload of the next frame; None at the end. An incomplete frame is ignored.

        Raises:
            FrameError: the frame is invalid.
        """
        while not self._payloads:
            if not (data := await receive(self._connection)):
                return None
            self._payloads += self._reader.feed(data)
        return self._payloads.popleft()

    def close(self) -> None:
        """Close the socket. A task that waits for it raises `trio.ClosedResourceError`."""
        if self._connection.fileno() >= 0:
            trio.lowlevel.notify_closing(self._connection)
            self._connection.close()
