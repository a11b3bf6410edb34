"""The command as the first process of a container, and with an output that takes nothing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

COMMAND = [sys.executable, "-m", "trioserve"]


def _handles(pid: int, number: int) -> bool:
    status = Path(f"/proc/{pid}/status").read_text()
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


def test_a_signal_in_the_first_second_ends_it() -> None:
    alone = ["unshare", "--pid", "--fork", "--kill-child"]
    try:
        subprocess.run([*alone, "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no process can be the first of a namespace here")
    with subprocess.Popen([*alone, *COMMAND, "--port", "0"], stderr=subprocess.PIPE) as parent:
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children")
        while not (pids := children.read_text().split()):
            time.sleep(0.001)
        first = int(pids[0])
        try:
            while not _handles(first, signal.SIGTERM):
                time.sleep(0.001)
            subprocess.run(["kill", str(first)], check=True)
            assert parent.wait(60) == 128 + signal.SIGTERM
            assert parent.stderr is not None
            assert parent.stderr.read() == b""  # it had not begun to listen
        finally:
            parent.kill()


@pytest.mark.parametrize("argv", [["--help"], ["--version"], ["list"], ["mcp", "--help"]])
def test_an_output_that_takes_nothing(argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, *argv], stdout=full, stderr=subprocess.PIPE, text=True)
    said = "trioserve: the output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, said)
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        done = subprocess.run(
            [*COMMAND, *argv], stdout=reader.stdin, stderr=subprocess.PIPE, text=True
        )
    assert (done.returncode, done.stderr) == (1, "")
