"""The servers that are compared: starting and stopping them, asking them, and their resources."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from urllib.parse import urlsplit

import attrs

from benchmarks.driver import Address
from trioserve.bench.prompts import words
from trioserve.llama.machine import memory_use

#: The names of the servers in tables.
OURS, BASE = "trioserve", "llama-server"

#: Seconds a server gets to end after SIGTERM before it is killed.
STOP_TIMEOUT = 15.0


class TargetError(Exception):
    """The server can't be measured: it does not start, or does not answer."""


@attrs.frozen
class Target:
    """A server to measure. `pid` is known when this program started it."""

    name: str
    address: Address
    pid: int | None = None


def target_at(url: str) -> Target:
    """Make a target from a base URL such as ``http://127.0.0.1:8080``.

    Raises:
        TargetError: it is no such URL.
    """
    parts = urlsplit(url)
    if parts.scheme != "http" or not parts.hostname:
        raise TargetError(f"{url}: a base URL looks like http://127.0.0.1:8080")
    host = socket.gethostbyname(parts.hostname)
    return Target(parts.netloc, Address(host, parts.port or 80))


def ask(
    target: Target,
    method: str,
    path: str,
    body: object = None,
    *,
    timeout: float = 10.0,
    api_key: str = "",
) -> str:
    """Send one request outside the measurement and return the body of the answer.

    Raises:
        TargetError: there is no answer, or its status is not 200.
    """
    address = target.address
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    if body is not None:
        headers["Content-Type"] = "application/json"
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        text = response.read().decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise TargetError(f"{target.name}: {error}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise TargetError(f"{target.name}: {path} answered {response.status}: {text[:200]}")
    return text


def tokens_per_word(target: Target, *, api_key: str = "") -> float:
    """Return how many tokens a word of `words` is for a model, from ``/tokenize``.

    Raises:
        TargetError: the server does not answer, or answers something else.
    """
    body = {"model": "benchmark", "content": words(400, "tokens per word")}
    # A router loads the model for it.
    text = ask(target, "POST", "/tokenize", body, timeout=60.0, api_key=api_key)
    try:
        return len(json.loads(text)["tokens"]) / 400
    except (ValueError, KeyError, TypeError):
        raise TargetError(f"{target.name}: /tokenize answered {text[:80]!r}") from None


# -- starting and stopping


@attrs.frozen(kw_only=True)
class Flags:
    """The flags that the servers share; each has its own defaults for the rest."""

    model: Path | None = None  # None: the commands say which
    threads: int | None = None  # None: what each server takes by default
    slots: int = 8  # 0: what each server takes by default
    more: tuple[str, ...] = ()

    def arguments(self) -> list[str]:
        """Return the flags as arguments of a command."""
        pairs = {"-m": self.model, "-t": self.threads, "-np": self.slots}
        given = [pair for pair in pairs.items() if pair[1]]
        return [str(part) for pair in given for part in pair] + list(self.more)


@attrs.frozen
class Command:
    """The command of one server: its name in the tables, and the program before its flags."""

    name: str
    program: tuple[str, ...]
    more: tuple[str, ...] = ()  # flags for this one only


def trioserve(more: str = "", name: str = OURS) -> Command:
    """Return the command for trioserve, run by the interpreter that runs this."""
    return Command(name, (sys.executable, "-m", "trioserve"), tuple(shlex.split(more)))


def llama_server(path: Path, more: str = "", name: str = BASE) -> Command:
    """Return the command for llama-server.

    Raises:
        TargetError: there is no such program.
    """
    if not os.access(path, os.X_OK) or path.is_dir():
        raise TargetError(f"{path} is no program")
    return Command(name, (str(path.resolve()),), tuple(shlex.split(more)))


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
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
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
        target = Target(command.name, Address("127.0.0.1", port), process.pid)
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
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        raise TargetError("\n".join([f"{target.name}: {reason}", *lines[-15:]]))


def _stop(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT)
    # Children may outlive their parent: kill the group even if the parent has ended.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


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
            server = running(
                command, flags, logs / f"{command.name}.log", start_timeout=start_timeout
            )
            targets.append(stack.enter_context(server))
        yield targets


def exit_on_sigterm() -> None:
    """Turn SIGTERM into an exception, so that servers are stopped on the way out."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def layout_of(log: Path) -> str:
    """Return the layout of the KV cache that a server's log names: elastic, split or unified."""
    text = log.read_text(encoding="utf-8", errors="replace")
    if (named := re.search(r"\blayout\W+(elastic|split|unified|none)\b", text)) is not None:
        return named[1]
    if (given := re.search(r"\bkv_unified\W+(true|false)", text)) is not None:
        return "unified" if given[1] == "true" else "split"
    return "not in the log"


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep that many cores busy for the length of the block, as a build does."""
    loop = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(loop) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


# -- resources, from /proc


def cpu_of(pid: int, *, children: bool = True) -> float:
    """Return the seconds of CPU that a process and its running descendants have used so far."""
    found = _family(pid)
    return sum(_cpu(fields) for member, fields in found.items() if children or member == pid)


def loop_cpu(pid: int) -> float:
    """Return the seconds of CPU of a process's first thread, in trioserve that of the loop."""
    return _runtime(Path(f"/proc/{pid}/task/{pid}"))


def runtime_of(pid: int) -> float:
    """Return the seconds of CPU of the running threads of a process and its descendants.

    It counts nanoseconds, where `cpu_of` counts ticks of 10 ms.
    """
    return sum(_runtime(thread) for thread in _threads(pid))


def switches_of(pid: int) -> int:
    """Return how often the threads of a process and its descendants have gone to sleep so far."""
    total = 0
    for thread in _threads(pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            text = (thread / "status").read_text(errors="replace")
            found = re.search(r"^voluntary_ctxt_switches:\s*(\d+)", text, re.MULTILINE)
            total += int(found[1]) if found is not None else 0
    return total


def syscalls_of(pid: int, seconds: float) -> int | None:
    """Count the system calls of all threads of a process, with strace; None where it cannot."""
    try:
        with tempfile.NamedTemporaryFile("r") as counted:
            command = ["strace", "-f", "-c", "-o", counted.name, "-p", str(pid)]
            process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
            time.sleep(seconds)
            process.send_signal(signal.SIGINT)
            process.wait(STOP_TIMEOUT)
            total = re.search(r"^\s*100\.00\s.*\btotal$", counted.read(), re.MULTILINE)
    except OSError:
        return None
    return int(total[0].split()[3]) if total is not None else 0


def pss_of(pid: int) -> tuple[float, float]:
    """Return the PSS of a process and its descendants, and its part without files; MB."""
    found = memory_use(list(_family(pid))).processes.values()
    return sum(pss for pss, _ in found) / 1e6, sum(anonymous for _, anonymous in found) / 1e6


def _threads(pid: int) -> list[Path]:
    return [path for member in _family(pid) for path in Path(f"/proc/{member}/task").glob("*")]


def _runtime(thread: Path) -> float:
    try:
        return int((thread / "schedstat").read_text().split()[0]) / 1e9
    except (FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
        return 0.0


def _fields(path: Path) -> list[str]:
    """Read a ``stat`` of /proc from the state on: the name before it may hold anything."""
    return path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _cpu(fields: Sequence[str]) -> float:
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _family(pid: int) -> dict[int, list[str]]:
    """Read ``/proc/PID/stat`` of a process and of its descendants."""
    stats: dict[int, list[str]] = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it has ended meanwhile
            stats[int(entry.name)] = _fields(entry / "stat")
    found: dict[int, list[str]] = {}
    rest = [pid]
    while rest:
        member = rest.pop()
        if member in stats:
            found[member] = stats[member]
        rest += [child for child, fields in stats.items() if int(fields[1]) == member]
    return found
