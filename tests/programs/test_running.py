"""Programs are run so that nothing of them stays."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.programs.running import run
from tests.support.processes import is_alive

pytestmark = pytest.mark.system

#: Starts a daemon in a session apart, which keeps its output open, and ends.
DAEMON = """
import os, signal, sys
if os.fork() == 0:
    os.setsid()
    print(os.getpid(), flush=True)
    signal.pause()
sys.exit(3)
"""


async def test_a_daemon_is_ended_with_its_program(tmp_path: Path) -> None:
    command = [sys.executable, "-c", DAEMON]
    ended = await run(command, folder=tmp_path, environ={"PATH": os.environ["PATH"]})
    assert ended.code == 3
    assert not ended.output or not is_alive(int(ended.output))
