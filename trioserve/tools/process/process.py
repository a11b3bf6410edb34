"""`open_process`: a program that ends, with all that it has started, with the block."""

from __future__ import annotations

import logging
import marshal
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, Literal

import trio

from trioserve.errors import ToolRuntimeError
from trioserve.tools.process.fence import CommandFence
from trioserve.tools.process.limits import Limits

_log = logging.getLogger(__name__)

#: A Python that reads no settings and no packages, and imports it from where it was compiled.
_SUPERVISOR = (
    sys.executable, "-I", "-S", "-c",
    "import sys; sys.path.append(sys.argv[1]); import supervisor; supervisor.main()",
    str(Path(__file__).parent),
)  # fmt: skip

#: Seconds that a supervisor has to end its command. It needs milliseconds, and longer only where
#: it removes many files, or where a process waits for a disk.
_PATIENCE = 8.0

#: Bytes of one line of a supervisor.
_MAX_LINE = 4096


class Process:
    """A program that runs. `stdin`, `stdout` and `stderr` are its pipes, if it has them."""

    def __init__(self, supervisor: trio.Process, control: trio.SocketStream) -> None:
        assert supervisor.stdout is not None
        self.stdin = supervisor.stdin
        self.stdout = supervisor.stdout
        self.stderr = supervisor.stderr
        #: The number of its first process.
        self.pid = 0
        #: The limit for which it was ended: "processes", "memory" or none.
        self.limit_reached = ""
        self._supervisor = supervisor
        self._control = control
        self._heard = b""
        self._exit_code: int | None = None
        self._reading = trio.Lock()

    @property
    def has_ended(self) -> bool:
        """Whether it has ended, with all that it had started."""
        return self._supervisor.poll() is not None

    async def wait(self) -> int:
        """Wait until it has ended, and all that it has started was ended.

        What it wrote can still be read then. May be called by several tasks, and again.

        Returns:
            Its exit code, or less the number of the signal that it ended with.
        """
        async with self._reading:
            if self._exit_code is None:
                self._exit_code = -signal.SIGKILL  # if its supervisor was killed
                words = await self._hear()
                if words[:1] == ["ended"]:
                    self._exit_code = int(words[1])
                    self.limit_reached = "".join(words[2:])
                else:
                    self._kill()
        return self._exit_code

    async def start(self, order: Mapping[str, Any]) -> None:
        """Have the supervisor start it.

        Raises:
            ToolRuntimeError: it cannot be started.
        """
        data = marshal.dumps(dict(order))
        with suppress(trio.BrokenResourceError):  # what it says is there to be read
            await self._control.send_all(len(data).to_bytes(4, "big") + data)
        words = await self._hear()
        if words[:1] == ["pid"]:
            self.pid = int(words[1])
            words = await self._hear()
        if words[:1] != ["started"]:
            reason = " ".join(words[1:]) or "its supervisor has ended"
            raise ToolRuntimeError(f"cannot start {order['argv'][0]!r}: {reason}")

    async def _hear(self) -> list[str]:
        """The words of the next line of the supervisor; none if it has ended."""
        while b"\n" not in self._heard and len(self._heard) < _MAX_LINE:
            try:
                piece = await self._control.receive_some(_MAX_LINE)
            except trio.BrokenResourceError:
                piece = b""
            if not piece:
                return []
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode(errors="replace").split(" ")

    def _kill(self) -> None:
        """Kill its group. All else can only be found by its supervisor, which was killed."""
        if self.pid:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    async def end(self) -> None:
        """End it, with all that it has started. Is done within a time, also if cancelled."""
        with trio.CancelScope(shield=True):
            await self._control.aclose()
            for stream in (self.stdin, self.stdout, self.stderr):
                if stream is not None:
                    await stream.aclose()
            with trio.move_on_after(_PATIENCE):
                if await self._supervisor.wait() < 0:
                    self._kill()
                return
            _log.warning("process %d does not end; it is left to the system", self.pid)
            self._supervisor.kill()
            await self._supervisor.wait()


@asynccontextmanager
async def open_process(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str | None = None,
    limits: Limits | None = None,
    fence: CommandFence | None = None,
    stdin: bool = True,
    stderr: Literal["pipe", "stdout"] = "pipe",
    last: Sequence[str] = (),
) -> AsyncIterator[Process]:
    """Start a program, in a session of its own, with no descriptors but its standard ones.

    At the end of the block, and when this process dies, everything that it has started is killed.
    To let it end in peace, close its `stdin` and wait for it before.

    Args:
        argv: the program, which is looked for in the ``PATH`` of `env`, and its arguments.
        env: all of its variables.
        cwd: the folder that it starts in; None: that of this process.
        limits: what it may use; None: anything.
        fence: the folders that it may use, beside one of its own for temporary files, which is
            also its home; None: all.
        stdin: whether it has a pipe to read; without, it reads nothing.
        stderr: a pipe of its own, or that of its output.
        last: a command that is run when it has ended, also when this process has died. Only for
            programs without limits and without a fence.

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
        "fence": None if fence is None else _order_of(fence),
        "last": [*last],
        "temporary": None if limits is None and fence is None else tempfile.gettempdir(),
        "folder_variables": ["TMPDIR", *(["HOME"] if fence is not None else [])],
    }
    process = await _start_supervisor(stdin, stderr)
    try:
        await process.start(order)
        yield process
    finally:
        await process.end()


async def _start_supervisor(stdin: bool, stderr: Literal["pipe", "stdout"]) -> Process:
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
    return Process(supervisor, trio.SocketStream(trio.socket.from_stdlib_socket(ours)))


def _order_of(fence: CommandFence) -> dict[str, list[str]]:
    return {
        "writable": [*fence.writable],
        "readable": [*fence.readable],
        "devices": [*fence.devices],
    }
