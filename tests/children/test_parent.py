"""The end of a process that another one has started."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections import Counter

import pytest

from trioserve.children.frames import FrameReader
from trioserve.children.parent import VARIABLE, ParentSocket, take_parent


def read(connection: socket.socket, n_frames: int) -> list[bytes]:
    frames, found = FrameReader(), list[bytes]()
    while len(found) < n_frames:
        found += frames.feed(connection.recv(2**16))
    return found


def test_a_full_socket_holds_up_nobody_and_frames_stay_whole_and_in_order() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parent = ParentSocket(theirs)

        def send(number: int) -> None:
            for n in range(50):
                parent.send(b"%d %d " % (number, n) + bytes(100_000))

        threads = [threading.Thread(target=send, args=[number]) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()  # though the other side has read nothing
        seen: Counter[int] = Counter()
        for frame in read(ours, 200):
            number, n, rest = frame.split(b" ", 2)
            assert int(n) == seen[int(number)] and rest == bytes(100_000)
            seen[int(number)] += 1
        parent.send(b"at once")
        assert read(ours, 1) == [b"at once"]


def test_without_a_thread_the_next_call_sends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        parent = ParentSocket(theirs)
        long = bytes(1_000_000)
        parent.send(long)
        begun = b""
        while len(begun) <= len(long):
            begun += ours.recv(2**20)
            parent.send(b"")
        assert begun.startswith(len(long).to_bytes(4, "little") + long)


def test_what_nobody_reads_any_more_is_dropped() -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        parent = ParentSocket(theirs)
        parent.send(bytes(1_000_000))
        ours.close()
        for _ in range(3):
            parent.send(b"x")


def test_without_a_variable_standard_input_is_left_alone() -> None:
    environ = {"HOME": "/"}
    assert take_parent(environ) is None and environ == {"HOME": "/"}


@pytest.mark.system
def test_standard_input_becomes_empty() -> None:
    program = (
        "import os\n"
        "from trioserve.children.parent import take_parent\n"
        "parent = take_parent(os.environ)\n"
        f"assert {VARIABLE!r} not in os.environ and os.read(0, 1) == b''\n"
        "assert not os.get_inheritable(parent.connection.fileno())\n"
        "parent.send(b'done')\n"
    )
    ours, theirs = socket.socketpair()
    with ours, theirs:
        command = [sys.executable, "-c", program]
        subprocess.run(command, stdin=theirs, env={**os.environ, VARIABLE: "1"}, check=True)
        assert read(ours, 1) == [b"done"]
