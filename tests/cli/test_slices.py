"""The event loop's thread has short slices, and the threads that it starts have not."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading

import pytest

from trioserve.cli import slices

_GET = {"x86_64": 315, "aarch64": 275}


def slice_of_this_thread() -> int:
    """Ask the kernel; older ones say 0."""
    data = ctypes.create_string_buffer(slices._ATTR.size)
    assert ctypes.CDLL(None).syscall(_GET[platform.machine()], 0, data, len(data), 0) == 0
    return int(slices._ATTR.unpack(data.raw)[5])


@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in _GET, reason="calls Linux by number"
)
def test_threads_of_this_one_have_slices_as_usual() -> None:
    seen: list[int] = []

    def note() -> None:
        seen.append(slice_of_this_thread())

    def shorten() -> None:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # tests may run at another
        note()
        slices.shorten_slices()
        note()
        inner = threading.Thread(target=note)
        inner.start()
        inner.join()

    outer = threading.Thread(target=shorten)
    outer.start()
    outer.join()
    usual, short, inherited = seen
    if not usual:
        pytest.skip("the kernel does not tell slices")
    assert short == slices._SLICE_NS < usual == inherited
