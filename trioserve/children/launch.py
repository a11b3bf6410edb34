"""Starting processes that run trioserve, and that end with this one.

Standard input of each is a Unix socket for frames, both ways. It is a lifeline: the process exits
when our end is closed, as it is when we die. Standard output and error are a pipe for its log.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

import trio

import trioserve
from trioserve.children import parent
from trioserve.children.child import Child, Fork
from trioserve.children.zygote import CAN_FORK, FAILED, PR_SET_CHILD_SUBREAPER, READY, prctl
from trioserve.concurrency import run_in_worker
from trioserve.errors import ModelLoadError
from trioserve.log import get_logger

_log = get_logger("trioserve.children")

#: Starts a server. The folder that it is started in does not count as a place of packages.
COMMAND = (sys.executable, "-P", "-m", "trioserve")
_ZYGOTE = (sys.executable, "-P", "-m", "trioserve.cli.zygote")

#: Seconds that a zygote has to begin, and that a fork may take.
_START_TIMEOUT = 60.0
_FORK_TIMEOUT = 10.0


class Launcher(Protocol):
    """Starts processes."""

    async def launch(self, argv: Sequence[str]) -> Child:
        """Start ``trioserve`` with these arguments.

        When cancelled, no process is left.

        Raises:
            ModelLoadError: the system does not let us.
        """


@contextmanager
def _refusals() -> Iterator[None]:
    """Have a block raise ModelLoadError where the system lets it start no process."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise ModelLoadError(f"The process of the model cannot be started: {reason}.") from None


class Spawner:
    """Starts a new Python for each process, which takes about a second."""

    def __init__(self, environ: Mapping[str, str], command: Sequence[str] = COMMAND) -> None:
        self._environ = environ
        self._command = command

    async def launch(self, argv: Sequence[str]) -> Child:
        """See `Launcher.launch`."""
        start = partial(
            Child.spawn,
            [*self._command, *argv],
            env=environment(self._environ),
            log=subprocess.PIPE,
        )
        with _refusals():
            return await trio.to_thread.run_sync(start)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process, which also finds this package."""
    root = str(Path(trioserve.__file__).parent.parent)
    paths = [root, *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths), parent.VARIABLE: "1"}


def start_zygote(environ: Mapping[str, str], command: Sequence[str] = ()) -> Child:
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
        ours.pop_all()
    return Child(process, orders)


@asynccontextmanager
async def open_launcher(
    environ: Mapping[str, str], zygote: Child | None = None
) -> AsyncIterator[Launcher]:
    """Give the best way to start processes with an environment, as long as a block lasts.

    Args:
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
    """Starts processes as forks of a zygote, and in another way once that has died."""

    def __init__(self, zygote: Child, spawner: Launcher) -> None:
        self._zygote: Child | None = zygote
        self._orders = trio.socket.from_stdlib_socket(zygote.socket)
        self._spawner = spawner
        self._has_begun = False
        self._one_at_a_time = trio.Lock()

    @property
    def pid(self) -> int | None:
        """The number of the process that others are forked from, if there is one."""
        return self._zygote.pid if self._zygote is not None else None

    async def end(self) -> None:
        """End the zygote, in a shield."""
        forked, self._zygote = self._zygote, None
        if forked is not None:
            forked.kill()
            with trio.CancelScope(shield=True):
                await run_in_worker(partial(_reap, forked.pid))
            await forked.aend()

    async def launch(self, argv: Sequence[str]) -> Child:
        """See `Launcher.launch`."""
        async with self._one_at_a_time:
            forked = await self._fork(argv)
        return forked or await self._spawner.launch(argv)

    async def _fork(self, argv: Sequence[str]) -> Child | None:
        """Fork a process; None if the zygote has died. Raises ModelLoadError."""
        if self._zygote is None:
            return None
        if not self._has_begun:
            with contextlib.suppress(OSError), trio.move_on_after(_START_TIMEOUT):
                self._has_begun = await self._orders.recv(len(READY)) == READY
        with _refusals(), ExitStack() as ours, ExitStack() as theirs:
            connection, other = socket.socketpair()
            ours.enter_context(connection)
            theirs.enter_context(other)  # the process has its own copies
            log, log_end = os.pipe()
            output = ours.enter_context(os.fdopen(log, "rb", 0))
            theirs.callback(os.close, log_end)
            if self._has_begun and (pid := await self._order(argv, other.fileno(), log_end)):
                ours.pop_all()
                return Child(Fork(pid), connection, log=output)
        _log.warning("the process that others are forked from has ended, or hangs")
        await self.end()
        return None

    async def _order(self, argv: Sequence[str], *ends: int) -> int | None:
        """Order a fork; returns its number, or None if the zygote has died.

        Cannot be cancelled, because the answer would then be taken for that of the next order.

        Raises:
            ModelLoadError: the system does not allow another process.
        """
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", ends))]
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
        return int(answer) if answer else None


def _reap(group: int) -> None:
    """Reap a zygote that was killed, and the fork in the middle that it was going to reap."""
    with contextlib.suppress(ChildProcessError):
        while True:
            os.waitpid(-group, 0)


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
