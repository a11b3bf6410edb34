"""Start the servers that are compared, wait until they answer, and stop them again."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import attrs

from benchmarks.targets import Target, TargetError, ask, target_of

#: Seconds a server gets to end after SIGTERM before it is killed.
STOP_TIMEOUT = 15.0


@attrs.frozen(kw_only=True)
class Flags:
    """What both servers are started with: the flags that they share.

    Each has its own defaults for the rest: that is how people start it.
    """

    model: Path | None  # None: the commands say which
    threads: int | None = None  # None: what each server takes by default
    slots: int = 8  # 0: what each server takes by default
    more: tuple[str, ...] = ()  # for both, as they are

    def arguments(self) -> list[str]:
        """Return the flags as arguments of a command."""
        pairs = {"-m": self.model, "-t": self.threads, "-np": self.slots}
        given = [pair for pair in pairs.items() if pair[1]]
        return [str(part) for pair in given for part in pair] + list(self.more)


@attrs.frozen
class Command:
    """How one server is started: its name in the tables, and what comes before its flags."""

    name: str
    program: tuple[str, ...]
    more: tuple[str, ...] = ()  # flags for this one only


def trioserve(more: str = "") -> Command:
    """Return the command for trioserve, run by the interpreter that runs this."""
    return Command("trioserve", (sys.executable, "-m", "trioserve"), tuple(shlex.split(more)))


def llama_server(path: Path, more: str = "") -> Command:
    """Return the command for llama-server.

    Raises:
        TargetError: there is no such program.
    """
    if not os.access(path, os.X_OK) or path.is_dir():
        raise TargetError(f"{path} is no program")
    return Command("llama-server", (str(path.resolve()),), tuple(shlex.split(more)))


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


@contextlib.contextmanager
def running(
    command: Command, flags: Flags, log: Path, *, start_timeout: float = 180.0
) -> Iterator[Target]:
    """Run a server for the length of the block; its output goes to the file `log`.

    The target is yielded once ``/health`` answers 200. On leaving, the server gets SIGTERM, and
    the rest of its process group is killed after `STOP_TIMEOUT` seconds.

    Raises:
        TargetError: the server ended, or did not answer in time; the message has the end of its
            log.
    """
    port = free_port()
    arguments = [*command.program, *flags.arguments(), *command.more]
    arguments += ["--host", "127.0.0.1", "--port", str(port)]
    environ = dict(os.environ)
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # installed modules are compiled
    with log.open("wb") as output:
        process = subprocess.Popen(
            arguments,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a new process group, so that its children end with it
        )
    try:
        url = f"http://127.0.0.1:{port}"
        target = attrs.evolve(target_of(url, name=command.name), pid=process.pid)
        _wait_ready(target, process, log, start_timeout)
        yield target
    finally:
        _stop(process)


def _wait_ready(
    target: Target, process: subprocess.Popen[bytes], log: Path, timeout: float
) -> None:
    deadline = time.monotonic() + timeout
    while True:
        reason = ""
        try:
            ask(target, "GET", "/health", timeout=2.0)
        except TargetError as error:
            reason = str(error)
        # Looked at after every answer: another program may have taken the port meanwhile.
        if process.poll() is not None:
            reason = f"it ended with code {process.returncode}"
        elif not reason:
            return
        elif time.monotonic() <= deadline:
            time.sleep(0.02)
            continue
        else:
            reason = f"not ready after {timeout:g} s ({reason})"
        raise TargetError(f"{target.name}: {reason}\n{_end_of(log)}")


def layout_of(log: Path) -> str:
    """Return the layout of the KV cache that a server's log names: elastic, split or unified."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if (named := re.search(r"\blayout\W+(elastic|split|unified|none)\b", text)) is not None:
        return named[1]
    if (given := re.search(r"\bkv_unified\W+(true|false)", text)) is not None:
        return "unified" if given[1] == "true" else "split"
    return "not in the log"


def _end_of(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    return "\n".join(lines[-15:])


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT)
    # Children may outlive their parent: kill the group even if the parent has ended.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# -- what a server uses


@attrs.frozen
class Usage:
    """What a process and its children use: resident bytes, and CPU seconds so far."""

    memory: int
    cpu: float


def usage(pid: int) -> Usage | None:
    """Read what a process and its descendants use, or None where there is no ``/proc``."""
    if not Path("/proc/self/stat").exists():
        return None
    memory, cpu = 0, 0.0
    for fields in _family(pid).values():
        cpu += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        memory += int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
    return Usage(memory, cpu)


def family(pid: int) -> list[int]:
    """List a process and its descendants that still run."""
    return list(_family(pid))


def _family(pid: int) -> dict[int, list[str]]:
    """Read ``/proc/PID/stat`` of a process and of its descendants, from the state on."""
    children: dict[int, list[int]] = {}
    stats: dict[int, list[str]] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "stat").read_text(encoding="utf-8", errors="replace")
        except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            continue
        # The name stands in parentheses and may hold anything: fields count from the last one.
        fields = text.rpartition(")")[2].split()
        stats[int(entry.name)] = fields
        children.setdefault(int(fields[1]), []).append(int(entry.name))
    found, rest = {}, [pid]
    while rest:
        member = rest.pop()
        if member in stats:
            found[member] = stats[member]
        rest += children.get(member, [])
    return found


@contextlib.contextmanager
def all_running(
    commands: Sequence[Command], flags: Flags, logs: Path, *, start_timeout: float = 180.0
) -> Iterator[list[Target]]:
    """Run several servers side by side for the length of the block.

    Raises:
        TargetError: one of them could not be started; those already running are stopped.
    """
    logs.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        targets = []
        for command in commands:
            log = logs / f"{command.name}.log"
            server = running(command, flags, log, start_timeout=start_timeout)
            targets.append(stack.enter_context(server))
        yield targets


def exit_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that servers are stopped on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
