"""The process that becomes the processes of models: it has imported everything, and waits.

Importing takes a second, and what is imported takes 100 MB. A fork takes milliseconds and shares
the memory. It is safe because this process has one thread, no event loop and no model, and has not
looked for a GPU. A router forks it from itself, so that both share memory, too.

An order comes over a socket: a JSON list of the arguments, and with it the descriptors of the
process's ends of `trioserve.children.launch`. The process itself answers with its number, so that
it is known even if this process dies. The end of the socket is the end of this process. Linux only.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from trioserve.children.child import Child, Fork
from trioserve.children.parent import VARIABLE

#: True if this system can fork safely: it adopts orphans, and has descriptors of processes.
CAN_FORK = sys.platform == "linux" and hasattr(os, "pidfd_open")

#: The largest order, in bytes.
MAX_ORDER = 128 * 1024

#: Sent once everything is imported.
READY = b"ready"

#: The answer to an order that could not be carried out.
FAILED = b"0"

#: Of prctl: the signal for when the parent dies; to be the parent of orphans.
_PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36


def prctl(option: int, value: int) -> None:
    """Call prctl. Raises OSError."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _freeze() -> None:
    """Have later looks for garbage leave the memory alone that is shared with forks."""
    gc.collect()
    gc.freeze()


def fork_zygote() -> Child | socket.socket | None:
    """Fork this process. Returns the zygote here, and in the zygote its end of the socket.

    None: the system allows no other process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    _freeze()
    ctypes.CDLL(None).malloc_trim(0)
    try:
        pid = os.fork()
    except OSError:
        ours.close()
        theirs.close()
        return None
    if pid:
        theirs.close()
        return Child(Fork(pid), ours)
    ours.close()
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    return theirs


def wait_for_orders(orders: socket.socket) -> list[str] | None:
    """Fork a process for each order.

    Returns in each of these processes, with its arguments, to be what was ordered; and in this
    process once there are no more orders, with None.
    """
    parent = os.getppid()
    _freeze()
    with contextlib.suppress(BrokenPipeError):  # the parent has ended: there are no orders
        orders.send(READY)
    while True:
        try:
            message, descriptors, _flags, _address = socket.recv_fds(orders, MAX_ORDER, 2)
        except ConnectionResetError:  # it has ended without reading the above
            return None
        if not message:
            return None
        if _fork_twice(orders):
            _join(parent)
            with orders, contextlib.suppress(BrokenPipeError):
                orders.send(str(os.getpid()).encode())
            return _become(json.loads(message), descriptors)
        for each in descriptors:
            os.close(each)


def _fork_twice(orders: socket.socket) -> bool:
    """Fork a child that forks a grandchild and exits; our parent, a subreaper, adopts it.

    So the parent can wait for the grandchild, even if this process dies. Returns True in the
    grandchild, which answers the order, and False here. Without a grandchild, the order has failed.
    """
    own = os.getpid()
    middle = 0
    try:
        middle = os.fork()
        if middle == 0 and os.fork() == 0:
            return True
    except OSError:  # too many processes, or too little memory
        orders.send(FAILED)
    if os.getpid() != own:
        os._exit(0)
    if middle:
        os.waitpid(middle, 0)
    return False


def _join(parent: int) -> None:
    """Wait until a process is our parent, and die with it from then on."""
    deadline = time.monotonic() + 5.0
    while os.getppid() != parent:
        if time.monotonic() > deadline:
            os._exit(1)  # it has died
        time.sleep(0.0005)
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    os.setsid()


def _become(argv: list[str], descriptors: Sequence[int]) -> list[str]:
    """Take our ends into use; returns the arguments."""
    connection, log = descriptors
    for old, new in ((connection, 0), (log, 1), (log, 2)):
        os.dup2(old, new)
    for each in descriptors:
        os.close(each)
    os.environ[VARIABLE] = "1"
    _show_as(["trioserve", *argv])
    return argv


def _show_as(words: Sequence[str]) -> None:
    """Have ``ps`` show other words, as far as there is room for them."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    start, end = int(fields[45]), int(fields[46])  # where the words of this process are
    if start:  # which a system may keep to itself
        room = end - start - 1
        shown = b"\0".join(map(os.fsencode, words))
        ctypes.memmove(start, shown[:room].ljust(room, b"\0"), room)
