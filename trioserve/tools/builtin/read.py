"""`read_file`: the lines of a file, or all its bytes as base64."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator
from io import BufferedReader
from typing import Annotated

import msgspec
import trio
from msgspec import Meta

from trioserve.errors import ToolFileError
from trioserve.tools.builtin.file_tool import FileTool
from trioserve.tools.files.store import FileStatus, FileStore
from trioserve.tools.tool import ToolCallContext, ToolResult

_MAX_BYTES = 16 * 2**10
_MAX_BYTES_BASE64 = 32 * 2**20
_MAX_SECONDS = 15.0

#: A file with one of these in its first bytes is not text.
_NUL = b"\0"
_N_PROBED = 8192


class ReadArguments(msgspec.Struct):
    """What `read_file` reads."""

    path: Annotated[str, Meta(description="Path of the file")]
    start_line: Annotated[
        int, Meta(description="First line to read; lines count from 1 (default: 1)")
    ] = 1
    end_line: Annotated[
        int, Meta(description="Last line to read, inclusive (default: end of the file)")
    ] = -1
    append_loc: Annotated[bool, Meta(description="Begin each line with its number")] = False


class ReadFile(FileTool[ReadArguments]):
    """Reads a file."""

    ARGUMENTS = ReadArguments
    NAME = "read_file"
    DISPLAY_NAME = "Read file"
    DESCRIPTION = (
        "Read a text file, or a range of its lines. With append_loc, each line begins with its "
        'number, as in "1→...".'
    )

    def run(
        self, arguments: ReadArguments, files: FileStore, context: ToolCallContext
    ) -> ToolResult:
        """Read it."""
        path = arguments.path
        status = files.status(path)
        if status is None:
            raise ToolFileError(f"cannot stat file: {path}")
        if context.response_type == "base64":
            return _read_base64(path, files, status)
        is_part = arguments.start_line > 1 or arguments.end_line != -1
        if status.kind == "file" and status.size > _MAX_BYTES and not is_part:
            raise ToolFileError(
                f"file too large ({status.size} bytes, max {_MAX_BYTES}). Use start_line/end_line "
                "to read a portion."
            )
        with files.open(path) as file:
            check_text(file, path)
            return ToolResult.of_text(_read_lines(arguments, file))


def check_text(file: BufferedReader, path: str) -> None:
    """Raise ToolFileError if a file that was just opened is not text."""
    if _NUL in file.peek(_N_PROBED)[:_N_PROBED]:
        raise ToolFileError(f"file is binary, and not text: {path}")


def _read_base64(path: str, files: FileStore, status: FileStatus) -> ToolResult:
    with files.open(path) as file:
        content = file.read(_MAX_BYTES_BASE64 + 1)
    if len(content) > _MAX_BYTES_BASE64:
        size = max(status.size, len(content))
        raise ToolFileError(f"file too large ({size} bytes, max {_MAX_BYTES_BASE64})")
    encoded = base64.b64encode(content).decode("ascii")
    return ToolResult({"base64": encoded, "size_bytes": len(content)})


def _read_lines(arguments: ReadArguments, file: BufferedReader) -> str:
    parts: list[str] = []
    room = _MAX_BYTES
    for number, line in _lines_from(file, arguments.start_line):
        if arguments.end_line != -1 and number > arguments.end_line:
            break
        prefix = f"{number}→" if arguments.append_loc else ""
        part = prefix + line.decode("utf-8", "replace") + "\n"
        size = len(part.encode())
        if size > room:
            if not parts:  # one line that is longer than all that fits
                parts.append(part.encode()[:room].decode("utf-8", "ignore") + "\n")
            parts.append("[output truncated]")
            break
        parts.append(part)
        room -= size
    return "".join(parts)


def _lines_from(file: BufferedReader, first: int) -> Iterator[tuple[int, bytes]]:
    """The lines from number `first` on, each without its end, and only the beginning of a long
    one."""
    number = 1
    begins = True
    deadline = time.monotonic() + _MAX_SECONDS
    while piece := file.readline(2 * _MAX_BYTES):
        if begins and number >= first:
            yield number, piece.removesuffix(b"\n")
        begins = piece.endswith(b"\n")
        number += begins
        if number % 4096 == 0 or not begins:
            trio.from_thread.check_cancelled()
            if time.monotonic() > deadline:
                raise ToolFileError(f"it takes too long to get to line {first}")
