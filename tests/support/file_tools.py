"""Calls of the tools that work on files, in a directory of the test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trioserve.tools.builtin.file_tools import FileCall, FileThreads, FileTool
from trioserve.tools.files.host import HostFiles
from trioserve.tools.files.store import FileStore
from trioserve.tools.sandbox import PathSandbox
from trioserve.tools.tool import ToolCallContext, ToolResult


def tool_in(folder: Path, tool: type[FileCall]) -> FileTool:
    """A tool that may use the files of this directory."""
    sandbox = PathSandbox([str(folder)])

    def stores(context: ToolCallContext) -> FileStore:
        return HostFiles(sandbox, context.cwd)

    return FileTool(tool, stores, FileThreads())


async def call(
    tool: type[FileCall], folder: Path, *, response_type: str = "", **arguments: Any
) -> ToolResult:
    """Call a tool that may use the files of this directory."""
    context = ToolCallContext(response_type=response_type)
    return await tool_in(folder, tool).call(arguments, context)
