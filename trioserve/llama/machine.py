"""The machine: how many cores this process may use, and how much memory is free."""

from __future__ import annotations

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
        try:
            return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        except (AttributeError, OSError, ValueError):
            return None
    found = _cgroup_memory()
    return free if found is None else min(free, found[1])


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
