"""Runs a command, and ends what it leaves behind, such as daemons: ``python alone.py COMMAND``."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType

_PR_SET_CHILD_SUBREAPER = 36


def main() -> int:
    """Run the command until it ends, or until SIGTERM. Orphans of it become children of this."""
    if ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError("the kernel does not let this process adopt orphans")
    signal.signal(signal.SIGINT, lambda *_: None)  # it is for the command
    signal.signal(signal.SIGTERM, _end)
    try:
        code = subprocess.Popen(sys.argv[1:]).wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        _end_children()
    return code if code >= 0 else 128 - code


def _end(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)


def _end_children() -> None:
    """Kill the children, and theirs, which are adopted then."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    while found := children.read_text(encoding="ascii").split():
        for pid in map(int, found):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    sys.exit(main())
