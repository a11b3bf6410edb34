"""The side of a child process: its end of the socket, and the limits that it sets itself.

It imports nothing of trioserve, and little else. So any Python can import it from its folder, and a
small process starts as quickly with it.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from typing import BinaryIO
else:
    import _signal as signal  # `signal` takes longer than all else here
if sys.platform != "win32":  # which has no such limits
    import resource

_SIZE = 4


class Parent:
    """The process that has started this one, at the other end of a socket.

    Several threads may send.
    """

    def __init__(self, descriptor: int = 0) -> None:
        self._descriptor = descriptor
        self._input: BinaryIO = os.fdopen(descriptor, "rb", closefd=False)
        if sys.platform == "win32":
            import socket

            self._socket = socket.fromshare(self._input.read())
            self._input, self._output = self._socket.makefile("rb"), self._socket.makefile("wb")
        else:
            self._output = os.fdopen(descriptor, "wb", closefd=False)

    def receive(self) -> bytes | None:
        """Wait for the payload of the next frame. None: the parent has closed the socket."""
        head = self._input.read(_SIZE)
        length = int.from_bytes(head, "little")
        payload = self._input.read(length)
        return payload if len(head) == _SIZE and len(payload) == length else None

    def send(self, payload: bytes) -> None:
        """Send a frame. Raises OSError: the parent has closed the socket."""
        self._output.write(len(payload).to_bytes(_SIZE, "little") + payload)
        self._output.flush()

    def end_with_it(self) -> None:
        """Have this process exit when the socket ends, in the middle of its work, too.

        The parent has nothing more to send.
        """
        import threading

        threading.Thread(target=self._exit_at_end, daemon=True).start()

    def _exit_at_end(self) -> None:
        os.read(self._descriptor, 1)
        os._exit(1)


def go_first() -> None:
    """Have the kernel end this process, and not its parent, where memory is short."""
    try:
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # no Linux, or no such file
        return


if sys.platform != "win32":

    def lower(limit: str, value: int) -> None:
        """Lower a limit of the system, by its name, unless it is lower already."""
        which = getattr(resource, limit)
        _, hard = resource.getrlimit(which)
        if hard not in (resource.RLIM_INFINITY, -1):
            value = min(value, hard)
        resource.setrlimit(which, (value, value))

    def limit_memory(more: int) -> None:
        """Limit the address space to what this process has, and these bytes more."""
        size = 2**30
        try:
            with open("/proc/self/statm") as file:
                size = int(file.read().split()[0]) * resource.getpagesize()
        except OSError:  # macOS does not say, nor does it keep the limit
            pass
        lower("RLIMIT_AS", size + more)


def limit_time(seconds: float) -> None:
    """Have the system end this process when it has computed for so long. 0: do so no longer.

    The time of the clock does not count: other work may have the CPU. The parent limits it.
    """
    if sys.platform != "win32":
        signal.setitimer(signal.ITIMER_PROF, seconds)
