"""Sockets that systemd passes to a service: those it has opened, and one for notifications.

The protocols are those of ``sd_listen_fds(3)`` and ``sd_notify(3)``.
"""

from __future__ import annotations

import os
import re
import select
import socket
import threading
from collections.abc import MutableMapping

from trioserve.errors import ConfigError
from trioserve.log import get_logger

_log = get_logger("trioserve")

_FIRST_DESCRIPTOR = 3


def take_sockets(environ: MutableMapping[str, str]) -> list[socket.socket]:
    """Take the sockets that systemd has opened for this process, and their variables.

    Raises:
        ConfigError: one is not a stream socket.
    """
    pid, count = environ.pop("LISTEN_PID", ""), environ.pop("LISTEN_FDS", "")
    environ.pop("LISTEN_FDNAMES", None)
    if pid != str(os.getpid()) or re.fullmatch("[0-9]{1,6}", count) is None:
        return []
    taken = []
    for descriptor in range(_FIRST_DESCRIPTOR, _FIRST_DESCRIPTOR + int(count)):
        try:
            os.set_inheritable(descriptor, False)
            one = socket.socket(fileno=descriptor)
        except OSError as error:
            raise ConfigError(f"LISTEN_FDS: descriptor {descriptor}: {error.strerror}") from None
        if one.type != socket.SOCK_STREAM:
            one.close()
            raise ConfigError(f"LISTEN_FDS: descriptor {descriptor} is not a stream socket")
        taken.append(one)
    return taken


class Notifier:
    """Tells systemd of states, such as ``READY=1``. Without an address, nothing happens.

    Thread-safe, and never waits: while the queue of systemd's socket is full, a thread does, and
    then sends the newest value of each variable.
    """

    def __init__(self, address: str) -> None:
        self._path = "\0" + address[1:] if address[:1] == "@" else address
        self._lock = threading.Lock()
        self._unsent: dict[str, str] = {}  # the thread that adds the first one sends all

    def tell(self, **variables: str) -> None:
        """Send variables, or have them sent."""
        if not self._path:
            return
        with self._lock:
            is_first = not self._unsent
            self._unsent |= variables
        if is_first and not self._send():
            _log.warning("systemd does not read what it is notified of")
            try:
                threading.Thread(target=self._wait, name="trioserve-notify", daemon=True).start()
            except RuntimeError:  # no thread: a service runs without systemd
                self._unsent = {}

    def _wait(self) -> None:
        while not self._send(waits=True):
            pass

    def _send(self, *, waits: bool = False) -> bool:
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.setblocking(False)
                sender.connect(self._path)
                if waits:
                    poll = select.poll()
                    poll.register(sender, select.POLLOUT)  # which the other end's queue decides
                    poll.poll()
                with self._lock:
                    lines = (f"{name}={value}" for name, value in self._unsent.items())
                    sender.send("\n".join(lines).encode(errors="replace"))
                    self._unsent = {}
        except BlockingIOError:
            return False
        except OSError:  # systemd may be restarting; a service runs without it
            self._unsent = {}
        return True
