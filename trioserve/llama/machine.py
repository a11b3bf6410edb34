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
from pathlib import Path

_CPUS = Path("/sys/devices/system/cpu")
_MEMINFO = Path("/proc/meminfo")
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_NO_LIMIT = 2**60  # version 1 of cgroups has a number for none


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
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        return None
    quotas = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers:  # version 2
            quotas += _quotas(_CGROUPS, path, ("cpu.max",))
        elif "cpu" in controllers.split(","):
            quotas += _quotas(_CGROUPS / "cpu", path, ("cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return min(quotas, default=None)


def _quotas(root: Path, path: str, names: tuple[str, ...]) -> list[float]:
    """Read the quotas of a cgroup and of those that it is in.

    Inside a container, `path` may be what it is outside, and does not exist. The root does.
    """
    own = root / path.strip("/")
    quotas = []
    for folder in (own, *own.parents):
        try:
            quota, period = " ".join((folder / name).read_text() for name in names).split()
            if int(quota) > 0 and int(period) > 0:
                quotas.append(int(quota) / int(period))
        except (OSError, ValueError):
            pass  # no such cgroup, no such controller there, or "max": no limit
        if folder == root:
            break
    return quotas


def free_memory() -> int | None:
    """Return how many bytes can be allocated before the system kills processes; None: unknown.

    On Linux that is the available memory and swap, or what the limit of the process's cgroup leaves
    if that is less. Elsewhere it is the size of the memory.
    """
    try:
        fields = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        free = sum(int(fields[name].split()[0]) * 1024 for name in ("MemAvailable", "SwapFree"))
    except (OSError, KeyError, ValueError):
        return total_memory()
    found = _cgroup_memory()
    return free if found is None else min(free, found[1])


def total_memory() -> int | None:
    """Return the size of the machine's memory, whatever a container may use; None: unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def memory_limit() -> int | None:
    """Return how many bytes the container may use; None: no limit."""
    found = _cgroup_memory()
    return None if found is None or found[0] > _NO_LIMIT else found[0]


def _cgroup_memory() -> tuple[int, int] | None:
    """Return the memory limit of the container, and the bytes that it leaves; None: no limit."""
    for limit, usage, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
    ):
        path = _CGROUPS / limit
        try:
            text = path.read_text().strip()
            if text == "max":
                return None
            used = int((_CGROUPS / usage).read_text())
            stat = dict(
                line.split() for line in (path.parent / "memory.stat").read_text().splitlines()
            )
            return int(text), max(0, int(text) - used + int(stat.get(cache, 0)))
        except (OSError, ValueError):
            continue
    return None


_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPS = Path("/proc/self/maps")
_ADVICE: int | None = getattr(mmap, "MADV_HUGEPAGE", None)

#: What is smaller does not matter.
_LEAST = 8 * 2**20

_Range = tuple[int, int]


def has_huge_pages() -> bool:
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
