"""Threads that allocate share two heaps."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.system

#: Threads that hold memory at the same time; then malloc writes what heaps there are.
_SCRIPT = """
import ctypes, sys, threading

if "limit" in sys.argv:
    from trioserve.cli.memory import limit_arenas

    limit_arenas()

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
all_hold = threading.Barrier(6)

def allocate():
    libc.malloc(ctypes.c_size_t(10_000))
    all_hold.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="glibc has it")
def test_threads_share_two_heaps(tmp_path: Path) -> None:
    n_heaps = {}
    for mode in ("limit", "default"):
        path = tmp_path / mode
        subprocess.run([sys.executable, "-c", _SCRIPT, str(path), mode], check=True)
        n_heaps[mode] = path.read_text().count("<heap nr=")
    assert n_heaps["limit"] == 2
    assert n_heaps["default"] > 2
