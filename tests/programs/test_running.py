"""Nothing stays of a program that was run."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.programs.running import run
from tests.support.processes import is_alive

pytestmark = pytest.mark.system

#: Leaves a daemon, in a session apart, which keeps its output open.
LEAVES_A_DAEMON = """
import os, signal, sys
begun, begin = os.pipe()
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    os.write(begin, b"1")
    signal.pause()
os.read(begun, 1)
sys.exit(3)
"""


async def test_a_daemon_ends_with_its_program(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LEAVES_A_DAEMON]
    ended = await run(command, folder=tmp_path, environ={"PATH": os.environ["PATH"]})
    assert ended.code == 3
    assert not is_alive(int(ended.output))
