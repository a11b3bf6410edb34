"""Programs that end with the block that starts them, and all that they have started.

`open_process` starts one, `run` waits for its end and returns its output. `CommandLimits` and
`CommandSandbox` say what it may use, `clean_environment` gives it few variables and no keys.
"""

from __future__ import annotations

import codecs
import logging
import marshal
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

import attrs
import trio

from trioserve.children.child import INSIDE
from trioserve.children.frames import FrameError, FrameStream
from trioserve.errors import ToolRuntimeError
from trioserve.tools import confinement
from trioserve.tools.supervisor import FOLDER_LEFT

#: The folders of programs, libraries and settings. They hold nothing of a user.
_SYSTEM = (
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc", "/opt", "/nix/store",
    "/gnu/store", "/snap", "/proc", "/sys", "/var/lib/dpkg",
    "/run/systemd/resolve", "/run/resolvconf",
    "/run/NetworkManager/resolv.conf",
)  # fmt: skip

_DEVICES = tuple(f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom"))
_NAMES = frozenset(
    {"HOME", "LANG", "LANGUAGE", "LOGNAME", "PATH", "SHELL", "SSL_CERT_DIR", "SSL_CERT_FILE",
     "TERM", "TMPDIR", "TZ", "USER"}
)  # fmt: skip

_DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_log = logging.getLogger(__name__)

#: Seconds that a supervisor has to end its command. It needs milliseconds, and longer only where
#: it removes many files, or where a process waits for a disk.
_PATIENCE = 8.0

#: Bytes of a frame of a supervisor.
_MAX_FRAME = 4096

#: Bytes that a program may write beyond those that are kept. Then it is ended.
MAX_LOST = 64 * 2**20


@attrs.frozen(kw_only=True)
class CommandLimits:
    """Limits of a program and all that it starts. Beyond, it is ended."""

    #: Processes at the same time.
    processes: int = 64
    #: Bytes of memory, together; 0: no limit.
    memory: int = 2 * 2**30
    #: Open descriptors of each process.
    descriptors: int = 1024
    #: Bytes of a file that it writes.
    file_size: int = 2 * 2**30

    @property
    def rlimits(self) -> list[tuple[str, int]]:
        limits = [
            ("RLIMIT_CORE", 0),
            ("RLIMIT_NOFILE", self.descriptors),
            ("RLIMIT_FSIZE", self.file_size),
        ]
        if self.memory:
            # A program may reserve more than it uses. This stops one that is too quick to be seen.
            limits.append(("RLIMIT_DATA", 4 * self.memory))
        return limits


@attrs.frozen
class CommandSandbox:
    """The folders that a program may open: those of tools for writing, those of the system not.

    The kernel keeps to it (Landlock), for all that the program starts, too. It cannot signal
    processes outside, nor look into them. Sockets are not confined. Where the kernel has no
    Landlock, nothing is confined: see `has_landlock`.
    """

    writable: tuple[str, ...]
    readable: tuple[str, ...] = _SYSTEM
    devices: tuple[str, ...] = _DEVICES

    @classmethod
    def around(cls, folders: Iterable[str]) -> Self | None:
        """A sandbox around these folders. None, which is no sandbox, if one of them is the root."""
        real = tuple(os.path.realpath(folder) for folder in folders)
        return None if "/" in real else cls(real)

    def may_read(self, path: str) -> bool:
        real = os.path.realpath(path)
        return any(
            os.path.commonpath([real, folder]) == folder
            for folder in map(os.path.realpath, (*self.writable, *self.readable))
        )


@cache
def has_landlock() -> bool:
    """The kernel keeps programs to a sandbox."""
    return confinement.version() > 0


def clean_environment(sandbox: CommandSandbox | None = None) -> Mapping[str, str]:
    """Only those of this process that describe its system and its language.

    ``PATH`` has only folders that the sandbox lets a program read.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _NAMES or name.startswith("LC_")
    }
    kept["PATH"] = _path(kept.get("PATH", _DEFAULT_PATH), sandbox)
    kept.setdefault("TERM", "dumb")
    return kept


def _path(path: str, sandbox: CommandSandbox | None) -> str:
    folders = [folder for folder in path.split(":") if os.path.isabs(folder)]
    if sandbox is not None:
        folders = [folder for folder in folders if sandbox.may_read(folder)]
    return ":".join(folders) or _DEFAULT_PATH


#: A Python that reads no settings and no packages, and imports it from where it was compiled.
_SUPERVISOR = (
    sys.executable, "-I", "-S", "-c",
    "import sys; sys.path += sys.argv[1:3]; import supervisor; supervisor.main()",
    INSIDE, str(Path(__file__).parent),
)  # fmt: skip


class Process:
    """A program that runs. `stdin`, `stdout` and `stderr` are its pipes, if it has them."""

    def __init__(self, supervisor: trio.Process, control: socket.socket) -> None:
        assert supervisor.stdout is not None
        self.stdin = supervisor.stdin
        self.stdout = supervisor.stdout
        self.stderr = supervisor.stderr
        #: The number of its first process.
        self.pid = 0
        #: The limit that it exceeded, if it was killed for that: "processes" or "memory".
        self.limit_reached = ""
        #: Called at the end if its private folder could not be removed in time.
        self.on_folder_left: Callable[[], object] = lambda: None
        self._supervisor = supervisor
        self._frames = FrameStream(control, _MAX_FRAME)
        self._exit_code: int | None = None
        self._reading = trio.Lock()

    @property
    def has_ended(self) -> bool:
        """It has ended, with all that it had started."""
        return self._supervisor.poll() is not None

    async def wait(self) -> int:
        """Wait until it has ended, and all that it has started was ended.

        What it wrote can still be read then. May be called by several tasks, and again.

        Returns:
            Its exit code, or less the number of the signal that it ended with.
        """
        async with self._reading:
            if self._exit_code is None:
                words = await self._hear()
                if words[:1] == ["ended"]:
                    self._exit_code = int(words[1])
                    self.limit_reached = "".join(words[2:])
                else:  # its supervisor was killed
                    self._exit_code = -signal.SIGKILL
                    self._kill()
        return self._exit_code

    async def start(self, order: Mapping[str, Any]) -> None:
        """Have the supervisor start it.

        Raises:
            ToolRuntimeError: it cannot be started.
        """
        await self._frames.send(marshal.dumps(dict(order)))
        words = await self._hear()
        if words[:1] == ["pid"]:
            self.pid = int(words[1])
            words = await self._hear()
        if words[:1] != ["started"]:
            reason = " ".join(words[1:]) or "its supervisor has ended"
            raise ToolRuntimeError(f"cannot start {order['argv'][0]!r}: {reason}")

    async def _hear(self) -> list[str]:
        """The words of the next frame of the supervisor; none if it has ended."""
        try:
            words = await self._frames.receive()
        except FrameError:
            words = None
        return [] if words is None else words.decode(errors="replace").split(" ")

    def _kill(self) -> None:
        """Kill its group. All else can only be found by its supervisor, which was killed."""
        if self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """End it, with all that it has started. Is done within a time, also if cancelled."""
        with trio.CancelScope(shield=True):
            self._frames.close()
            for stream in (self.stdin, self.stdout, self.stderr):
                if stream is not None:
                    await stream.aclose()
            with trio.move_on_after(_PATIENCE):
                code = await self._supervisor.wait()
                if code < 0:
                    self._kill()
                if code == FOLDER_LEFT:
                    self.on_folder_left()
                return
            _log.warning("process %d does not end; its supervisor continues to kill it", self.pid)
            _LEFT.append(self._supervisor)


@asynccontextmanager
async def open_process(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    limits: CommandLimits | None = None,
    sandbox: CommandSandbox | None = None,
    stdin: bool = True,
    stderr: Literal["pipe", "stdout"] = "pipe",
    last: Sequence[str] = (),
) -> AsyncIterator[Process]:
    """Start a program in a new session, with only the standard descriptors.

    At the end of the block, and when this process dies, all processes that it started are killed.
    To let it exit normally, close its `stdin` and wait for it before.

    Args:
        argv: the program, which is looked for in the ``PATH`` of `env`, and its arguments.
        env: all of its variables.
        cwd: the folder that it starts in; None: that of this process.
        limits: of its resources; None: no limits.
        sandbox: the folders that it may use, besides a private one for temporary files, which is
            also its home; None: all.
        stdin: whether its standard input is a pipe; otherwise it is empty.
        stderr: a separate pipe, or that of standard output.
        last: a command to run when the program has ended, even if this process has died. Only for
            programs without limits and without a sandbox.

    Raises:
        ToolRuntimeError: it cannot be started.
    """
    order = {
        "argv": [*argv],
        "env": dict(env),
        "cwd": os.getcwd() if cwd is None else cwd,
        "is_limited": limits is not None,
        "rlimits": [("RLIMIT_CORE", 0)] if limits is None else limits.rlimits,
        "processes": 0 if limits is None else limits.processes,
        "memory": 0 if limits is None else limits.memory,
        "sandbox": None if sandbox is None else attrs.asdict(sandbox),
        "last": [*last],
        "temporary": None if limits is None and sandbox is None else tempfile.gettempdir(),
        "folder_variables": ["TMPDIR", *(["HOME"] if sandbox is not None else [])],
    }
    process = await _start_supervisor(stdin, stderr)
    try:
        await process.start(order)
        yield process
    finally:
        await process.end()


#: Supervisors of programs that did not end in time, until they have exited.
_LEFT: list[trio.Process] = []


async def _start_supervisor(stdin: bool, stderr: Literal["pipe", "stdout"]) -> Process:
    _LEFT[:] = [one for one in _LEFT if one.poll() is None]
    ours, theirs = socket.socketpair()
    with theirs:
        try:
            supervisor = await trio.lowlevel.open_process(
                [*_SUPERVISOR, str(theirs.fileno())],
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE if stderr == "pipe" else subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        except OSError as error:
            ours.close()
            raise ToolRuntimeError(f"cannot start a process: {error.strerror}") from error
        except BaseException:
            ours.close()
            raise
    return Process(supervisor, ours)


@attrs.frozen(kw_only=True)
class CommandOutput:
    """The end of a program, and its output."""

    #: Its standard output, up to the limit.
    data: bytes
    #: Its standard error, unless that went to standard output.
    errors: bytes = b""
    #: As a shell has it: 128 and the number of the signal, if a signal has ended it.
    exit_code: int = 0
    timed_out: bool = False
    #: It wrote more than `data` has.
    truncated: bool = False
    #: The limit that it exceeded, if it was killed for that: "processes", "memory" or "output".
    limit_reached: str = ""

    @property
    def text(self) -> str:
        """`data` as text. A character that the limit has cut is left out."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(self.data, final=not self.truncated)


async def run(
    argv: Sequence[str],
    *,
    timeout: float,
    max_output: int,
    on_output: Callable[[str], None] | None = None,
    stdin: bytes | Literal["held"] | None = None,
    merged: bool = True,
    on_folder_left: Callable[[], object] = lambda: None,
    **options: Any,
) -> CommandOutput:
    """Run a program to its end, or for some seconds. When cancelled, it ends the program first.

    Args:
        argv: the program and its arguments, as for `open_process`.
        timeout: seconds after which it is ended.
        max_output: bytes of its output to keep. It may write more, up to a limit.
        on_output: receives the kept output, piece by piece.
        stdin: what it reads; "held": nothing, but that ends only with this process, or with the
            time.
        merged: whether `CommandOutput.data` has standard error, too.
        on_folder_left: see `Process.on_folder_left`.
        options: others of `open_process`: `env`, `cwd`, `limits` and `sandbox`.

    Raises:
        ToolRuntimeError: it cannot be started.
    """
    kept = _Kept(max_output, on_output)
    errors = _Kept(max_output, None)
    exit_code = -signal.SIGKILL
    options["stderr"] = "stdout" if merged else "pipe"
    async with open_process(argv, stdin=stdin is not None, **options) as process:
        process.on_folder_left = on_folder_left
        with trio.move_on_after(timeout) as scope:
            await _talk(process, stdin, kept, errors)
            if not (kept.too_much or errors.too_much):
                exit_code = await process.wait()
    kept.finish()
    return CommandOutput(
        data=bytes(kept.data),
        errors=bytes(errors.data),
        exit_code=exit_code if exit_code >= 0 else 128 - exit_code,
        timed_out=scope.cancelled_caught,
        truncated=kept.lost > 0,
        limit_reached="output" if kept.too_much or errors.too_much else process.limit_reached,
    )


async def _talk(process: Process, stdin: bytes | str | None, kept: _Kept, errors: _Kept) -> None:
    """Write its input, and read its output, until it ends or has written too much."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(process.wait)
        if process.stdin is not None and isinstance(stdin, bytes):
            nursery.start_soon(_feed, process.stdin, stdin)
        if process.stderr is not None:
            nursery.start_soon(errors.take, process.stderr, nursery.cancel_scope)
        await kept.take(process.stdout, nursery.cancel_scope)


class _Kept:
    """The output of a program, up to a limit."""

    def __init__(self, limit: int, on_output: Callable[[str], None] | None) -> None:
        self.data = bytearray()
        self.lost = 0
        self._room = limit
        self._on_output = on_output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def too_much(self) -> bool:
        return self.lost > MAX_LOST

    async def take(self, stream: trio.abc.ReceiveStream, scope: trio.CancelScope) -> None:
        """Read to the end, or cancel the scope if that is too much."""
        async for piece in stream:
            kept = piece[: self._room]
            self._room -= len(kept)
            self.lost += len(piece) - len(kept)
            self.data += kept
            self._pass_on(self._decoder.decode(kept))
            if self.too_much:
                scope.cancel()

    def finish(self) -> None:
        """Pass on an incomplete last character, unless the limit has cut it."""
        if not self.lost:
            self._pass_on(self._decoder.decode(b"", final=True))

    def _pass_on(self, text: str) -> None:
        if text and self._on_output is not None:
            self._on_output(text)


async def _feed(stream: trio.abc.SendStream, data: bytes) -> None:
    async with stream:
        try:
            await stream.send_all(data)
        except trio.BrokenResourceError:
            return  # it does not read to the end
