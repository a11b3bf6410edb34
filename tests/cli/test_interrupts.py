"""Ctrl-C at each point of a command: it ends with status 130, and says nothing of Python."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

#: Runs the command, and sends it SIGINT at an event of Python's audit: an import, a file that is
#: opened, a process or a socket. Without a number, it writes how many there are up to a socket of a
#: server, or to the end.
_PROGRAM = """
import os, runpy, signal, sys
target, *sys.argv[1:] = sys.argv[1:]
n = 0
def hook(event, args):
    global n
    n += n > 0 or (event == "import" and args[0] == "trioserve.cli")
    if target == "count" and event == "socket.bind":
        print(n)
        sys.stdout.flush()
        os._exit(0)
    if str(n) == target:
        n += 1
        os.kill(os.getpid(), signal.SIGINT)
sys.addaudithook(hook)
try:
    runpy.run_module("trioserve", run_name="__main__", alter_sys=True)
finally:
    if target == "count":
        print(n)
"""

_POINTS = 8


def run(target: str, *argv: str, home: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, target, *argv],
        env={**os.environ, "HOME": str(home)}, stdin=subprocess.DEVNULL,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    "argv",
    [
        ("list",),
        ("show", "bundled"),
        ("ps", "--port", "1"),
        ("run", "--port", "1", "bundled", "Hello", "-n", "3"),
        ("bench", "-p", "8", "-n", "4", "-r", "1", "-t", "1"),
        ("serve", "--port", "0"),
        ("-m", "bundled", "--port", "0"),
    ],
    ids=lambda argv: argv[0],
)
def test_ctrl_c_ends_a_command_wherever_it_is(argv: tuple[str, ...], tmp_path: Path) -> None:
    whole = run("count", *argv, home=tmp_path)
    n_events = int(whole.stdout.splitlines()[-1])
    assert n_events > 100
    for i in range(_POINTS):
        point = 2 + (n_events - 10) * i // _POINTS
        done = run(str(point), *argv, home=tmp_path)
        assert done.returncode == 130, (point, done.stdout, done.stderr)
        assert "Traceback" not in done.stderr and "KeyboardInterrupt" not in done.stderr
