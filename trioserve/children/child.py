"""`Child`: a process that was started here, with a socket to it, until nothing is left of it."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, Self, TypeVar

import trio

from trioserve.children.frames import MAX_FRAME, FrameError, FrameReader, head

_T = TypeVar("_T")

#: The folder of `inside`, for the `sys.path` of a process that imports nothing of trioserve.
INSIDE = str(Path(__file__).parent)

#: Seconds for a process to end by itself when the socket to it was closed.
_FAREWELL = 0.5

_CHUNK = 2**18

#: Seconds between two looks whether it has ended, where the system does not tell.
_POLL = 0.05

#: The exit code of a fork if the real one is not known.
_UNKNOWN_END = 255

#: Variables without which a Python may not find its libraries.
_VARIABLES = ("LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH", "PYTHONHOME", "SYSTEMROOT")


class ChildError(Exception):
    """The process has ended, or sent what it must not.

    Attributes:
        code: how it has ended, as `Child.code`, if that is known; else 0.
    """

    code = 0


class Fork:
    """A child of this process that another one has forked, as a `subprocess.Popen`. Linux only."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self) -> int:
        """Wait until it has ended, and say how."""
        if self.returncode is None:
            try:
                self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
            except ChildProcessError:  # other code in this program waits for all processes
                self.returncode = _UNKNOWN_END
        return self.returncode


class Child:
    """A process, and the frames to and from it.

    One thread at a time may talk with it, and `end` it; `kill` may be called from any, also
    meanwhile. `trioserve.children.inside` is its own side. A block ends the process.

    A task of Trio waits with `ended`, and ends it with `aend`; the functions of
    `trioserve.children.frames` send and receive.

    Args:
        process: the process, which leads a session.
        connection: our end of the socket.
        log: our end of a pipe for its output.
        max_frame: bytes of a payload that it may send.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes] | Fork,
        connection: socket.socket,
        *,
        log: IO[bytes] | None = None,
        max_frame: int = MAX_FRAME,
    ) -> None:
        #: The number of the process.
        self.pid = process.pid
        self.socket, self.log = connection, log
        #: Its exit code, or less the number of the signal that ended it, as in `subprocess`.
        self.code: int | None = None
        self._process = process
        self._reader = FrameReader(max_frame)
        self._frames = deque[bytes]()
        self._lock = threading.Lock()
        self._is_killed = False

    @classmethod
    def spawn(
        cls,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        log: IO[bytes] | int = subprocess.DEVNULL,
        max_frame: int = MAX_FRAME,
    ) -> Self:
        """Start a program.

        Args:
            env: all of its variables; None: those of this process.
            log: where its output goes, both what C and what Python writes. With `subprocess.PIPE`,
                it can be read from the attribute.
            max_frame: bytes of a payload that it may send.

        Raises:
            OSError: it cannot be started.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = _open(theirs, command, env, log)
        except BaseException:
            ours.close()
            raise
        return cls(process, ours, log=process.stdout, max_frame=max_frame)

    @property
    def is_alive(self) -> bool:
        """True if the process was not killed and has not ended."""
        return not self._is_killed and not self._has_exited()

    def send(self, payload: bytes, deadline: float = math.inf) -> None:
        """Send a frame. After an exception the process is of no more use.

        Args:
            deadline: when it has to be sent, by `time.monotonic`.

        Raises:
            ChildError: the process has ended.
            TimeoutError: the process did not read it in time.
        """
        for part in (head(payload), payload):
            self._try(deadline, partial(self.socket.sendall, part))

    def receive(self, deadline: float = math.inf) -> bytes:
        """Wait for the payload of the next frame.

        Raises:
            ChildError: the process has ended, or sent an invalid frame.
            TimeoutError: none has come before the deadline, by `time.monotonic`. It may come yet.
        """
        while not self._frames:
            if not (data := self._try(deadline, partial(self.socket.recv, _CHUNK))):
                where = " within a frame" if self._reader.is_partial else ""
                raise ChildError(f"the process has ended{where}")
            try:
                self._frames += self._reader.feed(data)
            except FrameError as error:
                raise ChildError(str(error)) from None
        return self._frames.popleft()

    def _try(self, deadline: float, call: Callable[[], _T]) -> _T:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.socket.settimeout(None if left == math.inf else left)
        try:
            return call()
        except TimeoutError:
            raise
        except OSError as error:
            raise ChildError("the process has ended") from error

    async def read_log(self) -> bytes:
        """Wait for output of the process in its pipe; none: all who had the pipe have ended."""
        assert self.log is not None
        await trio.lowlevel.wait_readable(self.log)
        return os.read(self.log.fileno(), _CHUNK)

    def terminate(self) -> None:
        """Ask the process to end. Does nothing once it has."""
        with self._lock:
            if not self._is_killed:
                self._signal(os.kill, signal.SIGTERM)

    def kill(self) -> None:
        """Kill the process and all of its group. What waits for it raises.

        What it has started is in its group, unless that has left it.
        """
        self._kill_group()
        with self._lock, suppress(OSError):
            # A process that has left the group may still have the other end.
            self.socket.shutdown(socket.SHUT_RDWR)

    def _kill_group(self) -> None:
        with self._lock:
            if self._is_killed:
                return
            self._is_killed = True
            if sys.platform == "win32":
                self._process.kill()
            else:
                for call in (os.kill, os.killpg):  # a fork may not have its group yet
                    self._signal(call, signal.SIGKILL)

    def _signal(self, call: Callable[[int, int], None], number: signal.Signals) -> None:
        if self._process.returncode is None:  # not reaped, so the number is of no other process
            with suppress(ProcessLookupError, PermissionError):
                call(self.pid, number)

    def end(self, patience: float = _FAREWELL) -> int:
        """Close the socket, and wait for the end, which is soon. Returns `code`.

        Args:
            patience: seconds to wait before the process is killed. The rest of its group is killed
                in any case.
        """
        if patience > 0 and self.code is None:
            self.close()
            self._await_exit(time.monotonic() + patience)
        self.kill()
        self.close()
        return self._reap()

    async def aend(self, patience: float = 0.0) -> int:
        """As `end`. Not cancellable."""
        with trio.CancelScope(shield=True):
            if patience > 0 and self.code is None:
                self.close()
                with trio.move_on_after(patience):
                    await self._exited()
            self.kill()
            await self._exited()
        return self.end(0.0)

    async def ended(self) -> int:
        """Wait until the process has ended, and kill the rest of its group. Returns `code`.

        What it has sent and written can still be read.
        """
        await self._exited()
        self._kill_group()
        return self._reap()

    def close(self) -> None:
        """Close our ends. The process then ends by itself."""
        with self._lock:
            if self.socket.fileno() < 0:
                return
            ends: list[socket.socket | IO[bytes]] = [self.socket, *filter(None, [self.log])]
            if trio.lowlevel.in_trio_run():
                for each in ends:
                    trio.lowlevel.notify_closing(each)
            for each in ends:
                each.close()

    def _reap(self) -> int:
        """Learn how the process has ended, or will, as it was killed: its number is free then."""
        if self.code is None:
            self.code = self._process.wait()
        return self.code

    async def _exited(self) -> None:
        if self.code is not None:
            return
        try:
            descriptor = os.pidfd_open(self.pid)
        except (AttributeError, OSError):  # another system, or there are too many descriptors
            while not self._has_exited():  # noqa: ASYNC110
                await trio.sleep(_POLL)
            return
        try:
            await trio.lowlevel.wait_readable(descriptor)
        finally:
            os.close(descriptor)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.end(0.0 if kind else _FAREWELL)

    def _await_exit(self, deadline: float) -> None:
        delay = 0.0005
        while not self._has_exited() and time.monotonic() + delay < deadline:
            time.sleep(delay)
            delay = min(2 * delay, 0.05)

    def _has_exited(self) -> bool:
        if self.code is not None:
            return True
        if isinstance(self._process, subprocess.Popen) and not hasattr(os, "waitid"):
            return self._process.poll() is not None  # macOS, Windows
        try:
            # Does not reap it: its group is killed before.
            return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None
        except ChildProcessError:
            return True  # another thread has just reaped it


def _open(
    theirs: socket.socket,
    command: Sequence[str],
    env: Mapping[str, str] | None,
    log: IO[bytes] | int,
) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE if sys.platform == "win32" else theirs.fileno(),
        stdout=log,
        stderr=subprocess.STDOUT,
        env=env,
        bufsize=0,
        start_new_session=True,  # no Ctrl+C, and a group to kill
    )
    if sys.platform == "win32":
        assert process.stdin is not None
        with process.stdin as stdin:
            stdin.write(theirs.share(process.pid))
    return process


def how(code: int) -> str:
    """Describe the end of a process, as the end of a sentence that begins with its name."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def bare_environment() -> dict[str, str]:
    """Variables for a Python that imports what this one can, and knows nothing else of it."""
    environ = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    return environ
