"""`Runtime`: a place where tools run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from trioserve.tools.files.store import FileStore
from trioserve.tools.process import Output


class Runtime(ABC):
    """A place where tools run. May be used by several tasks at the same time."""

    @abstractmethod
    def files(self, cwd: str | None) -> FileStore:
        """The files there; relative paths begin in `cwd`, or else where the runtime says.

        Raises:
            InvalidRequestError: tools may not use this directory.
        """

    def check(self, cwd: str | None) -> None:  # noqa: B027 - most places would have to be asked
        """Look whether tools may use a directory, where that is known without asking.

        Raises:
            InvalidRequestError: they may not.
        """

    @abstractmethod
    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        timeout: float,
        max_output: int,
        on_output: Callable[[str], None] | None = None,
    ) -> Output:
        """Run a command to its end, or for some seconds. When cancelled, it has ended, too.

        It reads nothing, and what it writes to standard error goes to its output.

        Args:
            argv: the program, and its arguments.
            cwd: the directory that it starts in; None: where the runtime says.
            timeout: seconds after which it is ended.
            max_output: bytes of its output that are kept.
            on_output: is told what is kept, piece by piece.

        Raises:
            InvalidRequestError: tools may not use this directory.
            ToolRuntimeError: it cannot be started.
        """
