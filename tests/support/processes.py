"""The processes of this machine, as /proc shows them."""

from __future__ import annotations

import os
from pathlib import Path

import trio

from tests.support.waiting import patiently


def all_processes() -> list[int]:
    """The processes that there are. Each may have ended by the time that it is looked at."""
    # `Path.glob` fails when one ends while it looks.
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def read(pid: int, name: str) -> str:
    """Read a file of a process; empty when it has ended, or is another user's."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(encoding="utf-8", errors="replace")
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return ""


def words(pid: int, name: str) -> list[str]:
    """The words of ``cmdline``, or the variables of ``environ``."""
    text = read(pid, name).rstrip("\0")
    return text.split("\0") if text else []


def parent_of(pid: int) -> int:
    """The process that has started it; 0 when it has ended."""
    # The name stands in parentheses and may hold anything: fields count from the last one.
    fields = read(pid, "stat").rpartition(")")[2].split()
    return int(fields[1]) if fields else 0


def processor_seconds(pid: int) -> float:
    """The processor time that a process has taken, with the processes that it has started."""
    fields = read(pid, "stat").rpartition(")")[2].split()
    own = sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:  # it has ended
        threads = []
    started = [
        child for thread in threads for child in read(pid, f"task/{thread}/children").split()
    ]
    return own + sum(processor_seconds(int(child)) for child in started)


def is_alive(pid: int) -> bool:
    """True if a process is running. A zombie is not."""
    status = read(pid, "status")
    return bool(status) and "\nState:\tZ" not in status


def running(mark: str) -> list[int]:
    """The processes with a word in their command line."""
    return [pid for pid in all_processes() if mark in words(pid, "cmdline")]


def with_variable(name: str, value: str) -> list[int]:
    """The processes with a variable whose value begins like this."""
    return [
        pid
        for pid in all_processes()
        if any(one.startswith(f"{name}={value}") for one in words(pid, "environ")) and is_alive(pid)
    ]


async def until(mark: str, n: int) -> float:
    """Wait until `n` processes have a word in their command line. Returns the seconds."""
    began = trio.current_time()
    with patiently():
        while len(running(mark)) != n:
            await trio.sleep(0.002)
    return trio.current_time() - began
