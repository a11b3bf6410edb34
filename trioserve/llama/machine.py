"""The machine: its cores, its memory, and huge pages for weights and KV cache.

A decode reads all weights once. In pages of 4 KiB that is an address to look up for every 4 KiB,
which takes a tenth to a fifth of the time of a token in a virtual machine. Linux gives pages of
2 MiB if asked.

Pages of a mapped file are small on most systems, so weights are read into memory instead, where
there is enough of it. The buffers that a graph computes in stay as they are: in huge pages they
were no faster, or slower.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import IO, NamedTuple

if sys.platform != "win32":
    import fcntl
    import resource

_CPUS = Path("/sys/devices/system/cpu")
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_STATUS = Path("/proc/self/status")
_NO_LIMIT = 2**60  # version 1 of cgroups has a number for none

#: Addresses that the stacks of threads take, mostly without memory; the pools of malloc take as
#: many, which are not written to.
_FOR_THREADS = 128 * 2**20

_DATA = "VmData"  # of `_STATUS`: addresses that are written to


def physical_cores() -> int:
    """Count the physical cores this process may run on; two hardware threads are one core."""
    allowed = allowed_cpus()
    siblings = set()
    for cpu in allowed:
        try:
            siblings.add((_CPUS / f"cpu{cpu}" / "topology" / "thread_siblings").read_text())
        except OSError:
            break  # not Linux, or no /sys: guess as llama.cpp does
    else:
        return len(siblings)
    return len(allowed) if len(allowed) <= 4 else len(allowed) // 2


def allowed_cpus() -> tuple[int, ...]:
    """List the logical CPUs that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def cpu_quota() -> float | None:
    """Return how many CPUs' worth of time the process's cgroups grant it; None: no limit.

    That is what `docker run --cpus` and the CPU limit of a Kubernetes pod set.
    """
    quotas = []
    files = (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    for folder, names in product(_own_cgroups("cpu"), files):
        with suppress(OSError, ValueError):  # no such controller there, or "max": no limit
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if int(quota) > 0 and int(period) > 0:
                quotas.append(int(quota) / int(period))
    return min(quotas, default=None)


def _own_cgroups(controller: str) -> list[Path]:
    """List the folders of this process's cgroups and of those that they are in, up to the root.

    Inside a container, they may be named as they are outside, and not exist. The root does.
    """
    try:
        lines = _OWN_CGROUPS.read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    folders = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            root = _CGROUPS
        elif controller in controllers.split(","):
            root = _CGROUPS / controller
        else:
            continue
        own = root / path.strip("/")
        folders += [one for one in (own, *own.parents) if one.is_relative_to(root)]
    return folders


def free_memory(*, for_files: bool = False) -> int | None:
    """Return how many bytes can be allocated before the system kills processes; None: unknown.

    On Linux that is the available memory and swap, or what the limits of the process's cgroups or
    of the process itself leave if that is less. Elsewhere it is the size of the memory. `for_files`
    is what files may take that are mapped to be read: `ulimit -d` does not limit that.
    """
    try:
        free = sum(_sizes(_MEMINFO, "MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        return total_memory()
    limits = _free_addresses(for_files=for_files)
    return min([free, *limits, *(left for _, left in _cgroup_memory())])


def total_memory() -> int | None:
    """Return the size of the machine's memory, whatever a container may use; None: unknown.

    Where the addresses of this process are limited, it is what the limit leaves if that is less.
    """
    try:
        total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None
    return min([total, *_free_addresses()])


def memory_limit() -> int | None:
    """Return how many bytes the container may use; None: no limit."""
    return min((limit for limit, _ in _cgroup_memory()), default=None)


def _cgroup_memory() -> list[tuple[int, int]]:
    """Return the memory limits of the process's cgroups, and the bytes that each leaves."""
    found = []
    files = (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.high", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    )
    for folder, (name, usage, cache) in product(_own_cgroups("memory"), files):
        with suppress(OSError, ValueError):  # no such controller there, or "max": no limit
            limit = int((folder / name).read_text())
            lines = (folder / "memory.stat").read_text().splitlines()
            kept = int(dict(line.split() for line in lines).get(cache, 0))
            left = limit - int((folder / usage).read_text()) + kept
            found.append((limit, max(0, left)))
    return [one for one in found if one[0] < _NO_LIMIT]


def has_address_limit() -> bool:
    """Return True if `ulimit -v` or `ulimit -d` limits this process."""
    return bool(_address_limits())


def _address_limits() -> list[tuple[int, str, int]]:
    """Return limits of addresses, the names of what they count, and what threads take of that.

    `ulimit -v` limits all addresses, and `ulimit -d` those of memory that is written to.
    """
    if sys.platform == "win32":
        return []
    found = [
        (resource.getrlimit(resource.RLIMIT_AS)[0], "VmSize", 2 * _FOR_THREADS),
        (resource.getrlimit(resource.RLIMIT_DATA)[0], _DATA, _FOR_THREADS),
    ]
    return [one for one in found if one[0] != resource.RLIM_INFINITY]


def _free_addresses(*, for_files: bool = False) -> list[int]:
    """Return how many bytes the limits of this process leave it to map, besides its threads."""
    found = []
    limits = [one for one in _address_limits() if not (for_files and one[1] == _DATA)]
    for limit, name, threads in limits:
        with suppress(OSError, KeyError, ValueError):
            (size,) = _sizes(_STATUS, name)
            found.append(max(0, limit - size - threads))
    return found


def _sizes(path: Path, *names: str) -> tuple[int, ...]:
    """Read sizes in a file of the kernel, as bytes. Raises OSError, KeyError, ValueError."""
    fields = dict(line.split(":", 1) for line in path.read_text().splitlines())
    return tuple(int(fields[name].split()[0]) * 1024 for name in names)


def anonymous_memory() -> int:
    """Return how many bytes of this process are no file's; 0: unknown."""
    with suppress(OSError, KeyError, ValueError):
        return _sizes(_STATUS, "RssAnon")[0]
    return 0


class MemoryUse(NamedTuple):
    """Bytes that are free, and for each process those that it has, and of these no file's.

    What several processes share counts in parts. What is no file's cannot be had without an end of
    the process; pages of files are free for others already.
    """

    free: int | None
    processes: Mapping[int, tuple[int, int]]


def memory_use(pids: Sequence[int]) -> MemoryUse:
    """Measure the memory of processes, of those that still run."""
    found = {}
    for pid in pids:
        with suppress(OSError, KeyError, ValueError):
            whole, anonymous = _sizes(Path(f"/proc/{pid}/smaps_rollup"), "Pss", "Pss_Anon")
            found[pid] = (whole, anonymous)
    return MemoryUse(free_memory(), found)


def mark_in_use(path: Path) -> IO[bytes] | None:
    """Mark a file for `is_in_use`, as long as what this returns is open; None: it cannot be."""
    try:
        file = path.open("rb")
    except OSError:
        return None
    if sys.platform != "win32":
        with suppress(OSError):  # a file system without locks
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    return file


def is_in_use(path: Path) -> bool:
    """Return True if this process or another one has marked a file."""
    if sys.platform == "win32":
        return False
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS = Path("/proc/self/maps")
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)

#: Bytes below which huge pages do not matter.
_LEAST = 8 * 2**20

_Range = tuple[int, int]


def has_huge_pages() -> bool:
    """Return True if the system gives huge pages on request."""
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
        self._known = writable_ranges() if has_huge_pages() else None

    def advise(self) -> None:
        """Ask for what was allocated since the last call, or since this object was made."""
        if self._known is None or _ADVICE is None:
            return
        madvise = ctypes.CDLL(None).madvise
        madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        now = writable_ranges()
        for start, end in without(now, self._known):
            if end - start >= _LEAST:
                madvise(start, end - start, _ADVICE)  # where it is refused, pages are small
        self._known = now


def writable_ranges() -> list[_Range]:
    """List the addresses of this process's memory that is no file's, nor the heap."""
    ranges = []
    # Line by line: what this allocates and frees should not change what it lists.
    with suppress(OSError), _MAPS.open(errors="replace", newline="\n") as lines:
        for line in lines:  # names have any characters
            addresses, rights, *_, name = f"{line} ".split(" ", 5)
            if rights == "rw-p" and not name.strip():
                start, end = (int(address, 16) for address in addresses.split("-"))
                ranges.append((start, end))
    return ranges


def without(ranges: list[_Range], others: list[_Range]) -> list[_Range]:
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
