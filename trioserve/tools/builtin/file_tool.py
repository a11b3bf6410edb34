"""`FileTool`: what the tools that work on files have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import msgspec
import trio

from trioserve.errors import ToolFileError, TrioServeError
from trioserve.tools.arguments import read_arguments, schema_of
from trioserve.tools.files.store import FileStore, FileStores
from trioserve.tools.tool import Tool, ToolCallContext, ToolInfo, ToolResult

_A = TypeVar("_A", bound=msgspec.Struct)

#: More would not be quicker: they take turns with the GIL, and hold up the event loop.
_N_READING = 2


class FileThreads:
    """The threads that the tools of a server share."""

    def __init__(self) -> None:
        """Let a few calls read, and one write: of two edits of a file, both are kept."""
        self.reading = trio.CapacityLimiter(_N_READING)
        self.writing = trio.CapacityLimiter(1)


class FileTool(Tool, Generic[_A]):
    """A tool whose work is done in a worker thread, on the files that a call is about."""

    #: Its arguments, described for models.
    ARGUMENTS: type[_A]
    NAME: ClassVar[str]
    DISPLAY_NAME: ClassVar[str]
    DESCRIPTION: ClassVar[str]
    WRITES: ClassVar[bool] = False

    def __init__(self, stores: FileStores, threads: FileThreads) -> None:
        """Work on the files that `stores` finds, in one of these threads."""
        self._stores = stores
        self._threads = threads.writing if self.WRITES else threads.reading
        self._info = ToolInfo(
            name=self.NAME,
            description=self.DESCRIPTION,
            parameters=schema_of(self.ARGUMENTS),
            display_name=self.DISPLAY_NAME,
            writes=self.WRITES,
            uses_cwd=True,
        )

    @property
    def info(self) -> ToolInfo:
        """What it is."""
        return self._info

    async def call(self, arguments: Mapping[str, Any], context: ToolCallContext) -> ToolResult:
        """Run it in a thread; a file that it cannot use is a result with an error."""
        read = read_arguments(self.ARGUMENTS, arguments)
        files = await self._stores(context)
        try:
            return await trio.to_thread.run_sync(
                self.run, read, files, context, limiter=self._threads
            )
        except ToolFileError as error:
            return ToolResult.of_error(error.message)

    async def preview(self, arguments: Mapping[str, Any], context: ToolCallContext) -> str | None:
        """Tell what it would change; None, too, if it could not."""
        if not self.WRITES:
            return None
        try:
            read = read_arguments(self.ARGUMENTS, arguments)
            files = await self._stores(context)
            return await trio.to_thread.run_sync(self.diff, read, files, limiter=self._threads)
        except TrioServeError:
            return None

    @abstractmethod
    def run(self, arguments: _A, files: FileStore, context: ToolCallContext) -> ToolResult:
        """Do the work, in a worker thread. Raises ToolFileError for what the model can mend."""

    def diff(self, arguments: _A, files: FileStore) -> str | None:
        """Tell what `run` would change, in a worker thread, as a unified diff."""
        return None
