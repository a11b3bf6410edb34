"""Has the kernel run the event loop as soon as it wakes up, although others compute.

The threads of a decode poll, so on two cores they keep both of them. Linux gives a thread that
wakes up its turn at the next tick: up to 4 ms later, for each read and write. A thread with short
slices has its turn at once (since Linux 6.12, whose scheduler goes by deadlines); all of them
together are no longer.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

#: `sched_attr` of Linux: size, policy, flags, nice, and the slice in its field `sched_runtime`.
_ATTR = struct.Struct("IIQiIQQQII")
_RESET_ON_FORK = 1  # the threads that decode, and the children, have slices as usual
_SLICE_NS = 100_000
_SYSCALLS = {"x86_64": 314, "aarch64": 274}


def shorten_slices() -> None:
    """Give this thread short slices, where the kernel lets it."""
    number = _SYSCALLS.get(platform.machine())
    if sys.platform != "linux" or number is None:
        return
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    if os.sched_getscheduler(0) != os.SCHED_OTHER or nice < 0:
        return  # for these, children would begin with another policy
    attr = _ATTR.pack(_ATTR.size, os.SCHED_OTHER, _RESET_ON_FORK, nice, 0, _SLICE_NS, 0, 0, 0, 0)
    ctypes.CDLL(None).syscall(number, 0, attr, 0)  # older kernels ignore it, and some refuse it
