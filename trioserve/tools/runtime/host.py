"""`Host`: tools on this machine, inside a fence."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trioserve.tools.files.host import HostFiles
from trioserve.tools.files.store import FileStore
from trioserve.tools.paths import Fence
from trioserve.tools.process import CommandFence, Limits, Output, clean_environment, run
from trioserve.tools.runtime.runtime import Runtime


class Host(Runtime):
    """This machine. Commands may use what is inside of the fence, and read the system's files."""

    def __init__(self, fence: Fence, limits: Limits) -> None:
        """Run commands inside the fence, each within these limits."""
        self._fence = fence
        self._limits = limits
        self._walls = CommandFence.around(fence.folders)

    def files(self, cwd: str | None) -> FileStore:
        """The files inside of the fence."""
        return HostFiles(self._fence, cwd)

    def check(self, cwd: str | None) -> None:
        """Look whether a directory is inside of the fence."""
        self._fence.folder(cwd)

    async def run(
        self,
        argv: Sequence[str],
        *,
        cwd: str | None = None,
        timeout: float,
        max_output: int,
        on_output: Callable[[str], None] | None = None,
    ) -> Output:
        """Run a command inside the fence."""
        return await run(
            argv,
            timeout=timeout,
            max_output=max_output,
            on_output=on_output,
            env=clean_environment(self._walls),
            cwd=self._fence.folder(cwd),
            limits=self._limits,
            fence=self._walls,
        )
