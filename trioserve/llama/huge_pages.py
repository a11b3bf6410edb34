"""Weights and KV cache in huge pages: 2 MiB instead of 4 KiB, where Linux gives them if asked.

A decode reads all weights once. In pages of 4 KiB that is an address to look up for every 4 KiB,
which takes a tenth to a fifth of the time of a token in a virtual machine.

Pages of a mapped file are small on most systems, so weights are read into memory instead, where
there is enough of it. The buffers that a graph computes in stay as they are: in huge pages they
were no faster, or slower.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS = Path("/proc/self/maps")
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)

#: What is smaller does not matter.
_LEAST = 8 * 2**20

_Range = tuple[int, int]


def available() -> bool:
    """Whether the system gives huge pages to those that ask."""
    try:
        return _ADVICE is not None and "[never]" not in _ENABLED.read_text()
    except OSError:
        return False


class HugePages:
    """Asks for huge pages for large allocations.

    That has to be done before they are written to. Memory of others that is allocated meanwhile has
    huge pages then, too, which does it no harm.
    """

    def __init__(self) -> None:
        self._known = _writable() if available() else None

    def advise(self) -> None:
        """Ask for what was allocated since the last call, or since this object was made."""
        if self._known is None or _ADVICE is None:
            return
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        now = _writable()
        for start, end in _without(now, self._known):
            if end - start >= _LEAST:
                madvise(start, end - start, _ADVICE)  # where it is refused, pages are small
        self._known = now


def _writable() -> list[_Range]:
    """List the addresses of this process's memory that is no file's, nor the heap."""
    ranges = []
    try:
        lines = _MAPS.read_text().splitlines()
    except OSError:
        return []
    for line in lines:
        addresses, rights, *_, name = f"{line} ".split(" ", 5)
        if rights == "rw-p" and not name.strip():
            start, end = (int(address, 16) for address in addresses.split("-"))
            ranges.append((start, end))
    return ranges


def _without(ranges: list[_Range], others: list[_Range]) -> list[_Range]:
    """Take others out of ranges. Both are in order, and neither overlaps itself."""
    left = []
    for start, end in ranges:
        for other_start, other_end in [
            each for each in others if each[0] < end and start < each[1]
        ]:
            left.append((start, other_start))
            start = other_end
        left.append((start, end))
    return [(start, end) for start, end in left if start < end]
