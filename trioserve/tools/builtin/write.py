"""`write_file`: makes a file, or replaces what it has."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from trioserve.errors import ToolFileError
from trioserve.tools.builtin.diffs import opaque_diff, unified_diff
from trioserve.tools.builtin.file_tool import FileTool
from trioserve.tools.files.patterns import shown
from trioserve.tools.files.store import FileStore
from trioserve.tools.tool import ToolCallContext, ToolResult

#: Bytes of the file that is replaced, for which a diff is made.
_MAX_COMPARED = 4 * 2**20


class WriteArguments(msgspec.Struct):
    """What `write_file` writes."""

    path: Annotated[str, Meta(description="Path of the file")]
    content: Annotated[str, Meta(description="What to write")]


class WriteFile(FileTool[WriteArguments]):
    """Writes a file."""

    ARGUMENTS = WriteArguments
    NAME = "write_file"
    DISPLAY_NAME = "Write file"
    DESCRIPTION = (
        "Write a file, and make it and the directories that it is in if they do not exist. To "
        "change a part of a file, use edit_file."
    )
    WRITES = True

    def run(
        self, arguments: WriteArguments, files: FileStore, context: ToolCallContext
    ) -> ToolResult:
        """Write it."""
        data = encoded(arguments.content, "content")
        try:
            diff = self.diff(arguments, files)
        except ToolFileError:  # that it cannot be read need not mean that it cannot be written
            diff = None
        files.write(arguments.path, data)
        answer = {
            "result": "file written successfully",
            "path": shown(arguments.path),
            "bytes": len(data),
        }
        return ToolResult(answer, diff)

    def diff(self, arguments: WriteArguments, files: FileStore) -> str:
        """Compare what is there with what will be."""
        encoded(arguments.content, "content")
        if files.status(arguments.path) is None:
            return unified_diff(arguments.path, None, arguments.content)
        with files.open(arguments.path) as file:
            data = file.read(_MAX_COMPARED + 1)
        if len(data) > _MAX_COMPARED or b"\0" in data:
            return opaque_diff(arguments.path)
        return unified_diff(arguments.path, data.decode("utf-8", "replace"), arguments.content)


def encoded(text: str, name: str) -> bytes:
    """The bytes of an argument.

    Raises:
        ToolFileError: it has characters that are none.
    """
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ToolFileError(f"{name} has half of a surrogate pair") from None
