"""A process that speaks to a router as a server does, and serves nothing.

Its report of a failure is what it knows of itself. Then it does what its arguments say: ``exit
3`` exits, ``hang`` ignores its lifeline, and without any it waits for the end of that. With
``helper``, it has started a process in a new session, which waits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from trioserve.children.parent import take_parent
from trioserve.children.reports import Failed


def _start_helper() -> int:
    return subprocess.Popen(["sleep", "60"], start_new_session=True).pid


def main(argv: Sequence[str]) -> int:
    parent = take_parent(os.environ)
    assert parent is not None
    info = {
        "pid": os.getpid(),
        "parent": os.getppid(),
        "session": os.getsid(0),
        "argv": argv,
        "shown": Path("/proc/self/cmdline").read_text().rstrip("\0").split("\0"),
        "colour": os.environ.get("COLOUR"),
        "helper": _start_helper() if argv[:1] == ["helper"] else None,
        "descriptors": sorted(int(name) for name in os.listdir("/proc/self/fd")),
    }
    print("on standard output", flush=True)
    print("on standard error", file=sys.stderr, flush=True)
    parent.send(msgspec.msgpack.encode(Failed(json.dumps(info))))
    if argv[:1] == ["exit"]:
        return int(argv[1])
    if argv[:1] == ["hang"]:
        while True:
            signal.pause()
    parent.connection.recv(1)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
