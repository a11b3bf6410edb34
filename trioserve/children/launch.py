"""Starting processes that run trioserve, and that end with this one.

Standard input of each is a Unix socket for frames, both ways. It is a lifeline: the process exits
when our end is closed, as it is when we die. Standard output and error are a pipe for its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import attrs
import trio

import trioserve
from trioserve.children import parent
from trioserve.children.zygote import (
    CAN_FORK,
    FAILED,
    PR_SET_CHILD_SUBREAPER,
    READY,
    Zygote,
    prctl,
)
from trioserve.errors import ModelLoadError
from trioserve.log import get_logger

_log = get_logger("trioserve.children")

#: Starts a server. The folder that it is started in does not count as a place of packages.
COMMAND = (sys.executable, "-P", "-m", "trioserve")
_ZYGOTE = (sys.executable, "-P", "-m", "trioserve.cli.zygote")

#: Seconds that a zygote has to begin, and that a fork may take.
_START_TIMEOUT = 60.0
_FORK_TIMEOUT = 10.0

#: The exit status of a process if the real one is not known.
_UNKNOWN_END = 255


@attrs.frozen
class Launched:
    """A process that was started. Its owner waits for its end, and then closes it.

    Attributes:
        pid: its number.
        frames: the socket.
        log: what it writes to standard output and error.
        wait: waits until it has ended; gives its exit code, or less the number of its signal.
        send_signal: sends it a signal. Does nothing once it has ended.
        close: closes our ends, the lifeline among them. May be called twice.
    """

    pid: int
    frames: trio.abc.Stream
    log: trio.abc.ReceiveStream
    wait: Callable[[], Awaitable[int]]
    send_signal: Callable[[signal.Signals], None]
    close: Callable[[], None]


class Launcher(Protocol):
    """Starts processes."""

    async def launch(self, argv: Sequence[str]) -> Launched:
        """Start ``trioserve`` with these arguments.

        When cancelled, no process is left.

        Raises:
            ModelLoadError: the system does not let us.
        """


async def _launched(
    start: Callable[[int, int], Awaitable[trio.Process | _Fork | None]],
) -> Launched | None:
    """Make a socket and a pipe, and start a process with their other ends; None if that gives none.

    Raises:
        ModelLoadError: the system does not let us.
    """
    try:
        with ExitStack() as ours, ExitStack() as theirs:  # the process has its own copies
            one, other = socket.socketpair()
            frames_end = theirs.enter_context(other).fileno()
            frames = trio.SocketStream(trio.socket.from_stdlib_socket(ours.enter_context(one)))
            ours.callback(frames.socket.close)
            descriptor, log_end = os.pipe()
            theirs.callback(os.close, log_end)
            log = trio.lowlevel.FdStream(descriptor)
            ours.callback(log.close)
            process = await start(frames_end, log_end)
            if process is None:
                return None
            wait, send_signal, close = process.wait, process.send_signal, ours.pop_all().close
            return Launched(process.pid, frames, log, wait, send_signal, close)
    except OSError as error:
        reason = error.strerror or error
        raise ModelLoadError(f"The process of the model cannot be started: {reason}.") from None


class Spawner:
    """Starts a new Python for each process, which takes about a second."""

    def __init__(self, environ: Mapping[str, str], command: Sequence[str] = COMMAND) -> None:
        self._environ = environ
        self._command = command

    async def launch(self, argv: Sequence[str]) -> Launched:
        """See `Launcher.launch`."""

        async def start(frames: int, log: int) -> trio.Process:
            return await trio.lowlevel.open_process(
                [*self._command, *argv],
                stdin=frames,
                stdout=log,
                stderr=log,
                env=environment(self._environ),
                start_new_session=True,
            )

        launched = await _launched(start)
        assert launched is not None
        return launched


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a process has in its environment, which also finds this package."""
    root = str(Path(trioserve.__file__).parent.parent)
    paths = [root, *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths), parent.VARIABLE: "1"}


def start_zygote(environ: Mapping[str, str], command: Sequence[str] = ()) -> Zygote:
    """Start a zygote as a program; the number of its socket is added to the command.

    Raises:
        OSError: the system does not let us.
    """
    with ExitStack() as ours:
        orders, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.enter_context(orders)
        with theirs:
            process = subprocess.Popen(
                [*(command or _ZYGOTE), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env=environment(environ),
                start_new_session=True,
            )
        process.returncode = 0  # not to be waited for: `Forks` does
        ours.pop_all()
    return Zygote(process.pid, orders)


@asynccontextmanager
async def open_launcher(
    environ: Mapping[str, str], zygote: Zygote | None = None
) -> AsyncIterator[Launcher]:
    """Give the best way to start processes with an environment, as long as a block lasts.

    Args:
        environ: the environment.
        zygote: was forked from this process, with this environment; it ends with the block. None:
            one is started, where the system has forks that are safe.
    """
    spawner = Spawner(environ)
    if zygote is None and CAN_FORK:
        try:
            zygote = start_zygote(environ)
        except OSError as error:
            _log.warning("what others are forked from cannot be started", reason=error.strerror)
    if zygote is None:
        yield spawner
        return
    forks = Forks(zygote, spawner)
    try:
        yield forks
    finally:
        await forks.end()


class Forks:
    """Starts processes as forks of a zygote, and in another way once that has died.

    Args:
        zygote: a child of this process.
        spawner: starts processes in the other way.
    """

    def __init__(self, zygote: Zygote, spawner: Launcher) -> None:
        self._zygote: _Fork | None = _Fork(zygote.pid)
        self._orders = trio.socket.from_stdlib_socket(zygote.orders)
        self._spawner = spawner
        self._has_begun = False
        self._one_at_a_time = trio.Lock()

    @property
    def pid(self) -> int | None:
        """The number of the process that others are forked from, if there is one."""
        return self._zygote.pid if self._zygote is not None else None

    async def end(self) -> None:
        """End the zygote, in a shield."""
        process, self._zygote = self._zygote, None
        if process is not None:
            self._orders.close()
            process.send_signal(signal.SIGKILL)
            with trio.CancelScope(shield=True):
                await process.wait()

    async def launch(self, argv: Sequence[str]) -> Launched:
        """See `Launcher.launch`."""
        async with self._one_at_a_time:
            forked = await self._fork(argv)
        return forked or await self._spawner.launch(argv)

    async def _fork(self, argv: Sequence[str]) -> Launched | None:
        """Fork a process; None if the zygote has died. Raises ModelLoadError."""
        if self._zygote is None:
            return None
        if not self._has_begun:
            with contextlib.suppress(OSError), trio.move_on_after(_START_TIMEOUT):
                self._has_begun = await self._orders.recv(len(READY)) == READY
        forked = None
        if self._has_begun:
            forked = await _launched(partial(self._order, argv))
        if forked is None:
            _log.warning("the process that others are forked from has ended, or hangs")
            await self.end()
        return forked

    async def _order(self, argv: Sequence[str], frames: int, log: int) -> _Fork | None:
        """Order a fork; None if the zygote has died.

        Cannot be cancelled, because the answer would then be taken for that of the next order.

        Raises:
            ModelLoadError: the system does not allow another process.
        """
        descriptors = array("i", [frames, log])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        answer = b""
        with (
            contextlib.suppress(OSError, trio.ClosedResourceError),  # it has died
            _adopting_orphans(),
            trio.move_on_after(_FORK_TIMEOUT, shield=True),
        ):
            await self._orders.sendmsg([json.dumps(list(argv)).encode()], ancillary)
            answer = await self._orders.recv(32)
        if answer == FAILED:
            raise ModelLoadError("The process of the model cannot be started: too many processes.")
        return _Fork(int(answer)) if answer else None


@contextmanager
def _adopting_orphans() -> Iterator[None]:
    """Become the parent of our descendants' orphans while a block lasts. Raises OSError.

    A block is short: nothing here reaps what the process of a model leaves behind when it dies.
    The system's first process, or that of a container, adopts and reaps it.
    """
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        prctl(PR_SET_CHILD_SUBREAPER, 0)


class _Fork:
    """A child of this process that no `trio.Process` started, by a descriptor of it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._descriptor = os.pidfd_open(pid)
        self._code: int | None = None

    async def wait(self) -> int:
        """Wait until it has ended; returns its exit code, or less the number of its signal."""
        if self._code is None:
            await trio.lowlevel.wait_readable(self._descriptor)
            self._code = self._reap()
            os.close(self._descriptor)
        return self._code

    def _reap(self) -> int:
        try:
            os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED | os.WNOWAIT)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)  # the rest of its group
            ended = os.waitid(os.P_PIDFD, self._descriptor, os.WEXITED)
        except ChildProcessError:
            return _UNKNOWN_END  # other code in this program waits for all processes
        assert ended is not None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal. Does nothing once it has ended."""
        if self._code is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)
