"""The side of a process that runs trioserve: its end of the socket, which is its lifeline, too.

A small process has `trioserve.children.inside`, which waits where this never does.
"""

from __future__ import annotations

import os
import select
import socket
import threading
from collections.abc import MutableMapping

from trioserve.children.frames import framed

#: Set in the environment of a process whose standard input is the socket.
VARIABLE = "TRIOSERVE_PARENT"


class ParentSocket:
    """The program that has started this process, at the other end of a socket. Thread-safe.

    Attributes:
        connection: for one who reads frames; only `send` writes.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._is_waiting = False  # whether a thread sends the rest

    def send(self, payload: bytes) -> bool:
        """Send a frame. Never waits: what a full socket does not take, a thread sends.

        Returns whether the socket has taken all.
        """
        with self._lock:
            self._unsent += framed(payload)
            if self._is_waiting or self._has_sent():
                return not self._unsent
            self._is_waiting = True
        try:
            threading.Thread(target=self._send_rest, name="trioserve-parent", daemon=True).start()
        except RuntimeError:  # no thread: the next call sends it
            self._is_waiting = False
        return False

    def add(self, payload: bytes) -> None:
        """Send a frame with the next one, or when `flush` is called."""
        with self._lock:
            self._unsent += framed(payload)

    def flush(self) -> bool:
        """Send what the socket takes of the rest; returns whether nothing is left."""
        with self._lock:
            return self._has_sent()

    def _has_sent(self) -> bool:
        """Send what the socket takes; returns whether nothing is left."""
        try:
            while self._unsent:
                n_sent = self.connection.send(self._unsent, socket.MSG_DONTWAIT)
                del self._unsent[:n_sent]
        except BlockingIOError:
            return False
        except OSError:  # it has ended, and so will we
            self._unsent.clear()
        return True

    def _send_rest(self) -> None:
        poll = select.poll()
        poll.register(self.connection, select.POLLOUT)
        while self._is_waiting:
            poll.poll()
            with self._lock:
                self._is_waiting = not self._has_sent()

    def end_with_it(self) -> None:
        """Have this process end when the other one has, even while the event loop is busy."""
        threading.Thread(target=self._exit_at_end, name="trioserve-lifeline", daemon=True).start()

    def _exit_at_end(self) -> None:
        poll = select.poll()
        poll.register(self.connection, 0)  # reads nothing: only its end is an event
        while not poll.poll():
            pass
        os._exit(1)


def take_parent(environ: MutableMapping[str, str]) -> ParentSocket | None:
    """Take the socket from standard input, if there is one, and its variable."""
    if not environ.pop(VARIABLE, ""):
        return None
    connection = socket.socket(fileno=os.dup(0))
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return ParentSocket(connection)
