"""Starting the process of a model, with three pipes between it and the router.

Its standard input is a lifeline: nothing is written to it, and the process exits when it is closed,
as it is when the router dies. The process logs to standard output and error. To another descriptor,
whose number is in the environment, it writes its status as lines of JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Protocol

import attrs
import trio
from filelock import FileLock, Timeout

import trioserve
from trioserve.concurrency import alongside
from trioserve.errors import ModelLoadError
from trioserve.log import get_logger
from trioserve.router import zygote
from trioserve.router.zygote import LIFELINE_VARIABLE, STATUS_VARIABLE, FirstZygote

#: Starts a server. The folder that it is started in does not count as a place of packages.
COMMAND = (sys.executable, "-P", "-m", "trioserve")


class Launcher(Protocol):
    """Starts the processes of models."""

    async def launch(self, argv: Sequence[str]) -> LaunchedProcess:
        """Start ``trioserve`` with these arguments.

        When cancelled, no process is left.

        Raises:
            ModelLoadError: the system does not let us.
        """


@attrs.frozen
class Pipes:
    """The pipes of one process: its ends as descriptors, and ours as streams."""

    stdin: int
    status_end: int
    log_end: int
    status: trio.lowlevel.FdStream
    log: trio.lowlevel.FdStream
    _ours: ExitStack

    def close(self) -> None:
        """Close our ends, the lifeline among them. May be called twice."""
        self._ours.close()


@contextmanager
def open_pipes() -> Iterator[Pipes]:
    """The pipes for a process that is started in the block. If that fails, they are closed.

    Raises:
        ModelLoadError: the block, or making them, has raised an OSError.
    """
    ours = ExitStack()
    try:
        with ExitStack() as theirs:  # the process has its own copies
            stdin, lifeline = os.pipe()
            theirs.callback(os.close, stdin)
            ours.callback(os.close, lifeline)
            status, status_end = _readable(ours, theirs)
            log, log_end = _readable(ours, theirs)
            yield Pipes(stdin, status_end, log_end, status, log, ours)
    except BaseException as error:
        ours.close()
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise ModelLoadError(f"The process of the model cannot be started: {reason}.") from None
        raise


def _readable(ours: ExitStack, theirs: ExitStack) -> tuple[trio.lowlevel.FdStream, int]:
    descriptor, end = os.pipe()
    theirs.callback(os.close, end)
    stream = trio.lowlevel.FdStream(descriptor)
    ours.callback(stream.close)
    return stream, end


class LaunchedProcess:
    """A process that was started. Its owner waits for its end, and then closes it.

    Attributes:
        pid: its number.
        status: what it tells of its state.
        log: what it writes to standard output and error.
        wait: waits until it has ended; gives its exit code, or less the number of its signal.
        send_signal: sends it a signal. Does nothing once it has ended.
        close: closes our ends of the pipes, the lifeline among them.
    """

    def __init__(self, pipes: Pipes, process: trio.Process | _Fork) -> None:
        self.pid = process.pid
        self.status: trio.abc.ReceiveStream = pipes.status
        self.log: trio.abc.ReceiveStream = pipes.log
        self.wait, self.send_signal = process.wait, process.send_signal
        self.close = pipes.close


class Spawner:
    """Starts a new Python for each process, which takes about a second."""

    def __init__(self, environ: Mapping[str, str], command: Sequence[str] = COMMAND) -> None:
        self._environ = environ
        self._command = command

    async def launch(self, argv: Sequence[str]) -> LaunchedProcess:
        """See `Launcher.launch`."""
        with open_pipes() as pipes:
            told = {STATUS_VARIABLE: str(pipes.status_end), LIFELINE_VARIABLE: "1"}
            process = await trio.lowlevel.open_process(
                [*self._command, *argv],
                stdin=pipes.stdin,
                stdout=pipes.log_end,
                stderr=pipes.log_end,
                pass_fds=[pipes.status_end],
                env=with_package(self._environ) | told,
                start_new_session=True,
            )
        return LaunchedProcess(pipes, process)


def with_package(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which another Python finds this package."""
    root = str(Path(trioserve.__file__).parent.parent)
    paths = [root, *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}


_log = get_logger("trioserve.router")

#: Seconds that a zygote has to begin, and that a fork may take.
_START_TIMEOUT = 60.0
_FORK_TIMEOUT = 10.0

#: Seconds until a zygote that has died is replaced; twice as many for each one that did not begin.
_RESTART_DELAY = 1.0
_MAX_RESTART_DELAY = 300.0

_COMMAND = (sys.executable, "-P", "-m", "trioserve.cli.zygote")

#: The exit status of a process if the real one is not known.
_UNKNOWN_END = 255


@asynccontextmanager
async def open_launcher(
    environ: Mapping[str, str], first: FirstZygote | None = None
) -> AsyncIterator[Launcher]:
    """The best way to start processes with an environment, as long as a block lasts.

    Args:
        environ: the environment.
        first: a running zygote; it ends with its first order, to free its memory.
    """
    spawner = Spawner(environ)
    with adopting_orphans() as adopts:
        pass
    if not adopts:
        if first is not None:
            first.orders.close()
        yield spawner
        return
    forks = Forks(environ, spawner, first=first)
    async with alongside(forks.run):
        yield forks


_n_adopting = 0


@contextmanager
def adopting_orphans() -> Iterator[bool]:
    """Become the parent of our descendants' orphans while a block lasts; gives whether we do.

    A block is short: nothing here reaps what the process of a model leaves behind when it dies.
    The system's first process, or that of a container, adopts and reaps it.
    """
    global _n_adopting
    _n_adopting += 1
    adopts = hasattr(os, "pidfd_open")
    try:
        if adopts:
            zygote.prctl(zygote.PR_SET_CHILD_SUBREAPER, 1)
    except (OSError, AttributeError):
        adopts = False
    try:
        yield adopts
    finally:
        _n_adopting -= 1
        if adopts and not _n_adopting:
            zygote.prctl(zygote.PR_SET_CHILD_SUBREAPER, 0)


class Forks:
    """Starts processes as forks of a zygote, and without one while none is there.

    Args:
        environ: their environment.
        spawner: starts processes in the other way.
        command: starts a zygote; the number of its socket is added.
        first: a running zygote. It carries out one order and ends; the next order
            then starts another.
    """

    def __init__(
        self,
        environ: Mapping[str, str],
        spawner: Launcher,
        command: Sequence[str] = _COMMAND,
        first: FirstZygote | None = None,
    ) -> None:
        self._environ = environ
        self._spawner = spawner
        self._command = command
        self._first = first
        self._first_used = trio.Event()
        self._wanted = trio.Event()
        self._decided = trio.Event()  # there is a zygote, or it has failed
        self._one_at_a_time = trio.Lock()
        self._orders: trio.socket.SocketType | None = None
        self._zygote: trio.Process | _Fork | None = None

    @property
    def pid(self) -> int | None:
        """The number of the process that others are forked from, if there is one."""
        return self._zygote.pid if self._zygote is not None else None

    async def run(self) -> None:
        """Keep a zygote until cancelled. One that dies is replaced."""
        delay = _RESTART_DELAY
        if self._first is not None:
            await self._keep_one()
            self._decided.set()
            await self._wanted.wait()
        while True:
            try:
                began = await self._keep_one()
            except OSError as error:
                began = False
                _log.warning(
                    "the process that others are forked from cannot be started",
                    reason=error.strerror,
                )
            self._decided.set()
            delay = _RESTART_DELAY if began else min(2 * delay, _MAX_RESTART_DELAY)
            await trio.sleep(delay)

    async def _keep_one(self) -> bool:
        """Start a zygote, and wait until it has died. When cancelled, it ends.

        Returns whether it had begun.
        """
        process, ours = await self._open()
        with trio.socket.from_stdlib_socket(ours) as orders:
            began = False
            try:
                with trio.move_on_after(_START_TIMEOUT):
                    began = await orders.recv(len(zygote.READY)) == zygote.READY
                if began:
                    self._zygote, self._orders = process, orders
                    self._decided.set()
                    await process.wait()
            finally:
                self._zygote, self._orders = None, None
                process.kill()
                with trio.CancelScope(shield=True):
                    code = await process.wait()
        if not self._first_used.is_set() or self._wanted.is_set():
            _log.warning("the process that others are forked from has ended", exit_code=code)
        return began

    async def _open(self) -> tuple[trio.Process | _Fork, socket.socket]:
        """Start a zygote, or take the first one; returns it, and the socket for orders."""
        if (first := self._first) is not None:
            self._first = None
            return _Fork(first.pid, os.pidfd_open(first.pid)), first.orders
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                process = await trio.lowlevel.open_process(
                    [*self._command, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno()],
                    env=with_package(self._environ),
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            raise
        return process, ours

    async def launch(self, argv: Sequence[str]) -> LaunchedProcess:
        """See `Launcher.launch`."""
        await self._decided.wait()
        async with self._one_at_a_time:
            forked = None
            if self._orders is None:
                self._wanted.set()
            else:
                forked = await self._fork(self._orders, argv)
                self._end_first()
        return forked or await self._spawner.launch(argv)

    def _end_first(self) -> None:
        """End the first zygote once it has carried out an order."""
        if isinstance(self._zygote, _Fork):
            self._first_used.set()
            self._orders = None
            self._zygote.kill()

    async def _fork(
        self, orders: trio.socket.SocketType, argv: Sequence[str]
    ) -> LaunchedProcess | None:
        """Fork a process; None if the zygote has died. Raises ModelLoadError."""
        with open_pipes() as pipes:
            pid = await self._order(orders, argv, pipes)
            if pid is not None:
                return LaunchedProcess(pipes, _Fork(pid, os.pidfd_open(pid)))
            pipes.close()
        return None

    async def _order(
        self, orders: trio.socket.SocketType, argv: Sequence[str], pipes: Pipes
    ) -> int | None:
        """Order a fork; returns its number, or None if the zygote has died.

        Cannot be cancelled, because the answer would then be taken for that of the next order.

        Raises:
            ModelLoadError: the system does not allow another process.
        """
        descriptors = array("i", [pipes.stdin, pipes.status_end, pipes.log_end])
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, descriptors)]
        answer = b""
        with (
            adopting_orphans(),
            trio.move_on_after(_FORK_TIMEOUT, shield=True),
            contextlib.suppress(
                OSError, trio.ClosedResourceError
            ),  # it has died, which `_keep_one` logs
        ):
            await orders.sendmsg([json.dumps(list(argv)).encode()], ancillary)
            answer = await orders.recv(32)
        if answer == zygote.FAILED:
            raise ModelLoadError("The process of the model cannot be started: too many processes.")
        if answer:
            return int(answer)
        self._orders = None
        if self._zygote is not None:
            self._zygote.kill()
        return None


class _Fork:
    """A child of this process that no `trio.Process` started, by a descriptor of it."""

    def __init__(self, pid: int, descriptor: int) -> None:
        self.pid = pid
        self._descriptor = descriptor
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

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


_PREFIX = "trioserve-router-"
_LOCK = "lock"

#: The longest path of a folder that sockets fit into; the system has a limit of about 100 bytes.
_MAX_LENGTH = 80


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Make a folder that only we may enter, for the length of a block.

    What routers that were killed have left behind is removed, too: no process holds the lock in it.
    """
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(os.fsencode(path)) > _MAX_LENGTH:
        path.rmdir()
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    with FileLock(path / _LOCK):
        try:
            _sweep(path.parent)
            yield path
        finally:
            shutil.rmtree(path)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        lock = folder / _LOCK
        try:
            # One without a lock may be in the making.
            if folder.lstat().st_uid != os.getuid() or not lock.is_file():
                continue
            with FileLock(lock, blocking=False):
                shutil.rmtree(folder)
        except (Timeout, OSError):
            continue  # its router runs, or another one removes it
