"""What systemd passes to a service: sockets that it has opened, and a socket for notifications.

The protocols are those of ``sd_listen_fds(3)`` and ``sd_notify(3)``.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import MutableMapping
from contextlib import suppress

from trioserve.errors import ConfigError

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


def notify(address: str, *assignments: str) -> None:
    """Send assignments such as ``READY=1`` to systemd. Without an address, nothing happens."""
    if not address:
        return
    path = "\0" + address[1:] if address[0] == "@" else address
    # systemd may be restarting; a service runs without it.
    with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.sendto("\n".join(assignments).encode(errors="replace"), path)
