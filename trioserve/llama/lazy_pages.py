"""Memory of a KV cache that exists only where it was written to.

llama.cpp allocates the cache, logs how large it is, and fills it with zeros, which would take all
of its memory at once. So when the line comes, all addresses of the cache are mapped to the same
few pages, which take the zeros. After that they are mapped to pages that do not exist until they
are written to, and read as zeros until then::

    allocated   | ............................ |
    clearing    | a | a | a | a | a | a | a | a |      2 MiB, over and over
    ready       | ............................ |      nothing
    in use      | ###.... | #...... | ####... | ...

Linux only. What does not look as expected raises `NotLazyError`: then the cache is as llama.cpp
made it, or is not to be used.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import sys
from collections.abc import Iterator

import attrs

from trioserve.errors import ModelLoadError
from trioserve.llama.machine import has_address_limit, without, writable_ranges

#: Larger allocations are always separate mappings (glibc's `DEFAULT_MMAP_THRESHOLD_MAX`).
#: Smaller caches may take all of their memory.
SMALL = 32 * 2**20

_MIB = 2**20
_PAGE = mmap.PAGESIZE
_ALIAS = 2 * _MIB
#: Bytes that an allocation may have beyond what the log says: its header, and the rounding of both.
_SLACK = 16 * 1024
#: ggml aligns tensors in a buffer to this.
_ALIGNMENT = 32
_IS_MAPPED = 2  # the flag of an allocation that is a separate mapping
_FIXED, _POPULATE, _NORESERVE = 0x10, 0x8000, 0x4000
_NO_HUGE_PAGES = 15

_BUFFER = re.compile(r"(\S+) KV buffer size = +([\d.]+) MiB")
_SUMMARY = re.compile(
    r"\( *(\d+) cells, +(\d+) layers, +\d+/(\d+) seqs\), "
    r"K \(\w+\): +([\d.]+) MiB, V \(\w+\): +([\d.]+) MiB"
)

_Range = tuple[int, int]


class NotLazyError(ModelLoadError):
    """The memory of a KV cache cannot be made to exist only where it is written to."""


def is_supported() -> bool:
    """Return True on Linux, unless a limit counts addresses as memory."""
    is_there = sys.platform == "linux" and hasattr(os, "memfd_create")
    return is_there and not has_address_limit()


@attrs.frozen
class _Tensor:
    """The keys or the values of a layer: a part for each sequence, one after the other."""

    address: int
    part: int  # bytes
    row: int  # bytes of a cell


class KVPages:
    """Gives back the pages of a split KV cache."""

    def __init__(self, tensors: list[_Tensor]) -> None:
        self._tensors = tensors
        # It keeps the GIL: nearly all calls take a microsecond.
        self._madvise = ctypes.PyDLL(None).madvise
        self._madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

    def trim(self, seq: int, n_cells: int) -> None:
        """Give back the memory of a sequence behind its first `n_cells` cells."""
        for tensor in self._tensors:
            part = tensor.address + seq * tensor.part
            # Addresses are known up to the alignment of an allocation, so a page stays at each end.
            start = _up(part + n_cells * tensor.row) + _PAGE
            end = _down(part + tensor.part) - _PAGE
            if start < end:
                self._madvise(start, end - start, mmap.MADV_DONTNEED)


class LazyPages:
    """Makes the memory of a KV cache lazy, while llama.cpp makes it in this thread.

    Call `on_line` with each line of llama.cpp's log, and `finish` if the cache was made. With
    `swa_full`, layers with a sliding window keep all of the text.
    """

    def __init__(self, *, swa_full: bool = False) -> None:
        self._swa_full = swa_full
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        flags = (ctypes.c_int,) * 3
        self._libc.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *flags, ctypes.c_long)
        self._libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        self._known = writable_ranges()
        self._aliased: list[_Range] = []
        self._allocated: _Range | None = None  # what the next summary is of
        self._tensors: list[_Tensor] = []
        self._is_window = False
        self._n_small = 0
        self._error = ""

    def on_line(self, line: str) -> None:
        """Follow the log. It does not raise."""
        if (buffer := _BUFFER.search(line)) is not None:
            self._alias(buffer[1], int(float(buffer[2]) * _MIB))
        elif self._allocated is not None and (summary := _SUMMARY.search(line)) is not None:
            n_cells, n_layers, n_parts = (int(summary[i]) for i in (1, 2, 3))
            sizes = [float(summary[i]) * _MIB for i in (4, 5)]
            rows = [round(size / (n_layers * n_parts * n_cells)) for size in sizes]
            self._lay_out(n_cells, n_layers, n_parts, rows)
        elif "SWA KV cache" in line:
            # A window is small, and its cells are not in the order of the text.
            self._is_window = "non-SWA" not in line and not self._swa_full
        elif "kv_cache" in line:  # of a layer: the allocation is next
            self._known.clear()  # first: memory that is freed after the look may become the cache's
            self._known = writable_ranges()

    def finish(self) -> KVPages | None:
        """Map the pages; returns None for a small cache, which has all of its memory.

        Raises:
            NotLazyError: something was not as expected; the cache must not be used.
        """
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED | _NORESERVE
        for start, end in self._aliased:
            self._map(start, end - start, flags, -1)
            # In huge pages, the first cell of each tensor would take 2 MiB.
            self._libc.madvise(start, end - start, _NO_HUGE_PAGES)
        if self._allocated is not None or not (self._n_small or self._tensors):
            self._error = self._error or "llama.cpp's log does not say where it is"
        if self._error:
            raise NotLazyError(f"The KV cache cannot be allocated lazily: {self._error}.")
        return KVPages(self._tensors) if self._tensors else None

    def _alias(self, name: str, size: int) -> None:
        """Map all of a cache that was allocated, and is to be cleared, to the same pages."""
        if size <= SMALL or self._is_window:
            self._n_small += 1
            return
        new = without(writable_ranges(), self._known)
        fits = [found for start, end in new for found in _allocations(start, end, size)]
        if name != "CPU" or len(fits) != 1:
            self._error = f"it is in {name}" if name != "CPU" else "its addresses are not known"
            return
        self._allocated, (start, end) = fits[0], fits[0]
        start += _PAGE  # which has the allocator's header
        try:
            descriptor = os.memfd_create("kv-cache")
            os.ftruncate(descriptor, _ALIAS)
        except OSError as error:
            self._error = str(error)
            return
        self._aliased.append((start, end))
        for at in range(start, end, _ALIAS):
            length = min(_ALIAS, end - at)
            # All pages at once: a fault for each would take longer than the clearing.
            self._map(at, length, mmap.MAP_SHARED | _FIXED | _POPULATE, descriptor)
        os.close(descriptor)

    def _map(self, address: int, length: int, flags: int, descriptor: int) -> None:
        rights = mmap.PROT_READ | mmap.PROT_WRITE
        if self._libc.mmap(address, length, rights, flags, descriptor, 0) != address:
            self._error = os.strerror(ctypes.get_errno())

    def _lay_out(self, n_cells: int, n_layers: int, n_parts: int, rows: list[int]) -> None:
        """Compute where the keys and values of each layer are. All layers are of one size."""
        assert self._allocated is not None
        (address, end), self._allocated = self._allocated, None
        for _ in range(n_layers):
            for row in filter(None, rows):
                part = row * n_cells
                self._tensors.append(_Tensor(address, part, row))
                address += -(-part * n_parts // _ALIGNMENT) * _ALIGNMENT
        if not 0 <= end - address <= _SLACK:
            self._error = "its layers differ"


def _allocations(start: int, end: int, size: int) -> Iterator[_Range]:
    """Find allocations of about `size` bytes in new memory, which the system may have joined.

    glibc maps each separately, and writes its length and a flag behind the first eight bytes.
    """
    for at in range(start, end - size + 1, _PAGE):
        header = ctypes.c_size_t.from_address(at + ctypes.sizeof(ctypes.c_size_t)).value
        length = header & ~7
        if header & _IS_MAPPED and size <= length <= min(size + _SLACK, end - at):
            yield at, at + length


def _up(address: int) -> int:
    return -(-address // _PAGE) * _PAGE


def _down(address: int) -> int:
    return address // _PAGE * _PAGE
