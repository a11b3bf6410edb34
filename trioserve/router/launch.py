"""Starting the process of a model, with three pipes between it and the router.

Its standard input is a lifeline: nothing is written to it, and the process ends when it does, as it
does when the router dies. On standard output and error it logs. On a descriptor of its own, whose
number is in the environment, it tells its status as lines of JSON.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Protocol

import attrs
import trio

import trioserve
from trioserve.errors import ModelLoadError

#: Names the descriptor that a process tells its status on.
STATUS_VARIABLE = "TRIOSERVE_STATUS_FD"

#: Starts a server. The folder that it is started in does not count as a place of packages.
COMMAND = (sys.executable, "-P", "-m", "trioserve")

#: Says that standard input is a lifeline.
LIFELINE_VARIABLE = "TRIOSERVE_LIFELINE"


class Process(Protocol):
    """A process that was started. Whoever has it waits for its end, and then closes it."""

    @property
    def pid(self) -> int:
        """Its number."""

    @property
    def status(self) -> trio.abc.ReceiveStream:
        """What it tells of its state."""

    @property
    def log(self) -> trio.abc.ReceiveStream:
        """What it writes to standard output and error."""

    async def wait(self) -> int:
        """Wait until it has ended. Returns its exit code, or less the number of its signal."""

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal. Does nothing once it has ended."""

    def close(self) -> None:
        """Close our ends of the pipes, the lifeline among them."""


class Launcher(Protocol):
    """Starts processes."""

    async def launch(self, argv: Sequence[str]) -> Process:
        """Start ``trioserve`` with these arguments.

        When cancelled, no process is left.

        Raises:
            ModelLoadError: the system does not let us.
        """


class Pipes:
    """The pipes of one process: our ends as streams, and its ends as descriptors.

    Raises:
        OSError: there are no descriptors left.
    """

    def __init__(self) -> None:
        with ExitStack() as closing:
            pairs = [_pipe(closing) for _ in range(3)]
            closing.pop_all()
        (self.stdin, self._lifeline), (status, self.status_end), (log, self.log_end) = pairs
        self.status = trio.lowlevel.FdStream(status)
        self.log = trio.lowlevel.FdStream(log)

    def close_theirs(self) -> None:
        """Close the ends of the process, which has its own copies."""
        for descriptor in (self.stdin, self.status_end, self.log_end):
            os.close(descriptor)

    def close(self) -> None:
        """Close our ends. May be called twice."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1
            self.status.close()
            self.log.close()


def _pipe(closing: ExitStack) -> tuple[int, int]:
    ends = os.pipe()
    for end in ends:
        closing.callback(os.close, end)
    return ends


@contextmanager
def open_pipes() -> Iterator[Pipes]:
    """The pipes for a process that is started in the block. If that fails, they are closed.

    Raises:
        ModelLoadError: the block, or making them, has raised an OSError.
    """
    pipes = None
    try:
        pipes = Pipes()
        yield pipes
    except BaseException as error:
        if pipes is not None:
            pipes.close()
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise ModelLoadError(f"The process of the model cannot be started: {reason}.") from None
        raise
    finally:
        if pipes is not None:
            pipes.close_theirs()


@attrs.define(eq=False)
class Piped:
    """What every process has."""

    pipes: Pipes

    @property
    def status(self) -> trio.abc.ReceiveStream:
        """See `Process.status`."""
        return self.pipes.status

    @property
    def log(self) -> trio.abc.ReceiveStream:
        """See `Process.log`."""
        return self.pipes.log

    def close(self) -> None:
        """See `Process.close`."""
        self.pipes.close()


@attrs.define(eq=False)
class _Spawned(Piped):
    """A process that was started as any other."""

    _process: trio.Process

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        return await self._process.wait()

    def send_signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)


class Spawner:
    """Starts each process with a Python of its own, which takes about a second."""

    def __init__(self, environ: Mapping[str, str], command: Sequence[str] = COMMAND) -> None:
        self._environ = environ
        self._command = command

    async def launch(self, argv: Sequence[str]) -> Process:
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
        return _Spawned(pipes, process)


def with_package(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which another Python finds this package."""
    root = str(Path(trioserve.__file__).parent.parent)
    paths = [root, *filter(None, [environ.get("PYTHONPATH")])]
    return {**environ, "PYTHONPATH": os.pathsep.join(paths)}
