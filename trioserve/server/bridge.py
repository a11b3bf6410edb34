"""How the inference thread wakes the event loop: one descriptor, written once a step."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
from typing import Protocol

import trio

from trioserve.errors import BridgeError


class Bridge(Protocol):
    """A doorbell. Rings that come before it is answered count as one."""

    def notify(self) -> None:
        """Ring. From any thread; never blocks."""

    async def wait(self) -> None:
        """Wait until it rings, and answer.

        When cancelled, a ring that has come is kept for the next call.
        """

    def close(self) -> None:
        """Give the descriptors back. Nobody may ring or wait any more."""


class EventFdBridge:
    """An eventfd (Linux): a counter in the kernel, one descriptor."""

    def __init__(self) -> None:
        try:
            self._fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        except OSError as error:
            raise BridgeError(f"An eventfd could not be made: {error}") from error
        self._write = ctypes.PyDLL(None).eventfd_write
        self._write.argtypes = [ctypes.c_int, ctypes.c_uint64]

    def notify(self) -> None:
        # Keeps the GIL, which `os.eventfd_write` would give to the event loop just when the
        # inference thread wants to go on to `llama_decode`, which gives it up anyway.
        self._write(self._fd, 1)

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._fd)
        os.eventfd_read(self._fd)

    def close(self) -> None:
        os.close(self._fd)


class SocketPairBridge:
    """A pair of sockets, where there is no eventfd (macOS, Windows)."""

    def __init__(self) -> None:
        try:
            self._reader, self._writer = socket.socketpair()
        except OSError as error:
            raise BridgeError(f"A socket pair could not be made: {error}") from error
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def notify(self) -> None:
        # When the buffer is full of rings that nobody answered yet, one more adds nothing.
        with contextlib.suppress(BlockingIOError):
            self._writer.send(b"\0")

    async def wait(self) -> None:
        await trio.lowlevel.wait_readable(self._reader)
        self._reader.recv(65536)

    def close(self) -> None:
        self._reader.close()
        self._writer.close()


def open_bridge() -> Bridge:
    """Make the best bridge that this system has.

    Raises:
        BridgeError: there are no descriptors left, or none may be made.
    """
    return EventFdBridge() if hasattr(os, "eventfd") else SocketPairBridge()
