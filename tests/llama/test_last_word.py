"""The last line of a process that a fault ends."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.system

PROGRAM = """
import ctypes, os, signal, sys, threading
from trioserve.llama import last_word
last_word.install(2, lambda files: f"it was at work with {files}")
last_word.names("a" * 10_000)
last_word.names("the model\\nfile \\udcff.gguf", "another")
"""
BAD_ADDRESS = "ctypes.string_at(16)"


@pytest.mark.parametrize(
    ("fault", "number"),
    [
        ("ctypes.CDLL(None).abort()", signal.SIGABRT),
        (BAD_ADDRESS, signal.SIGSEGV),
        (f"one = threading.Thread(target=lambda: {BAD_ADDRESS}); one.start(); one.join()",
         signal.SIGSEGV),
        ("os.kill(os.getpid(), signal.SIGFPE); signal.pause()", signal.SIGFPE),
    ],
)  # fmt: skip
def test_a_fault(fault: str, number: signal.Signals) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM + fault], capture_output=True, check=False, timeout=60
    )
    assert done.stderr == b"it was at work with the model file \\udcff.gguf, another\n"
    assert done.returncode == -number


def test_pythons_own_handler_is_left_alone() -> None:
    program = PROGRAM.replace("last_word.install", "import faulthandler\nfaulthandler.enable()\n"
                              "last_word.install")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", program + BAD_ADDRESS], capture_output=True, check=False, timeout=60
    )
    assert done.stderr.startswith(b"Fatal Python error: Segmentation fault")
