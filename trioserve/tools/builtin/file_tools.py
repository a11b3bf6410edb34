"""`FileTool`, and the tools that read, write and edit a file.

`edit_file` replaces pieces of a file. The file must have each piece exactly once.
"""

from __future__ import annotations

import base64
import time
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from io import BufferedReader
from itertools import pairwise
from typing import Annotated, Any, ClassVar, NamedTuple

import attrs
import msgspec
import trio

from trioserve.concurrency import check_cancelled
from trioserve.errors import ToolFileError, TrioServeError
from trioserve.fair_limiter import FairLimiter
from trioserve.tools.builtin.diffs import MAX_DIFF, MAX_PREVIEW, opaque_diff, unified_diff
from trioserve.tools.files.patterns import shown
from trioserve.tools.files.store import FileStatus, FileStore, FileStores
from trioserve.tools.tool import (
    Tool,
    ToolCallContext,
    ToolInfo,
    ToolResult,
    about,
    read_arguments,
    schema_of,
)

#: Threads that read, and those that one client may have. More would not be quicker: they take turns
#: with the GIL, and hold up the event loop.
_N_READING, _N_READING_EACH = 3, 2

_MAX_TEXT = 16 * 2**10
_MAX_BYTES_BASE64 = 32 * 2**20
_MAX_READ_SECONDS = 15.0

#: A file with one of these in its first bytes is binary.
_NUL = b"\0"
_N_PROBED = 8192

#: Bytes of the largest file whose replacement is shown as a diff.
_MAX_COMPARED = 4 * 2**20
_MAX_EDITED = 4 * 2**20

#: Edits of one call, and seconds for all of them: each is looked for in the whole file.
_MAX_EDITS = 256
_MAX_EDIT_SECONDS = 15.0

#: Characters of a keyboard that models write in place of others, as llama-server has them: each
#: stands for one character. Other whitespace at the end of a line does not matter, either.
_ALIKE = str.maketrans(
    dict.fromkeys("\u2018\u2019\u201a\u201b", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f", '"')
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
    | dict.fromkeys("\u00a0\u202f\u205f\u3000" + "".join(map(chr, range(0x2002, 0x200B))), " ")
)


class FileThreads:
    """The threads that the tools of a server share."""

    def __init__(self) -> None:
        """Let a few calls read, and one write: of two edits of a file, both are kept."""
        self.reading = FairLimiter(_N_READING, _N_READING_EACH)
        self.writing = FairLimiter(1)


class FileCall(msgspec.Struct):
    """A call of a tool that works on files. Its fields are the arguments, described for models."""

    NAME: ClassVar[str]
    DISPLAY_NAME: ClassVar[str]
    DESCRIPTION: ClassVar[str]
    WRITES: ClassVar[bool] = False

    def run(self, files: FileStore, context: ToolCallContext) -> ToolResult:
        """Do the work, in a worker thread. Raises ToolFileError for what the model can correct."""
        raise NotImplementedError

    def preview(self, files: FileStore) -> str | None:
        """Show what `run` would change, in a worker thread, as a unified diff."""
        return None


class FileTool(Tool):
    """A tool whose work is done in a worker thread, on the files that a call is about."""

    def __init__(self, call: type[FileCall], stores: FileStores, threads: FileThreads) -> None:
        self._call = call
        self._stores = stores
        self._threads = threads
        self.info = ToolInfo(
            name=call.NAME,
            description=call.DESCRIPTION,
            parameters=schema_of(call),
            display_name=call.DISPLAY_NAME,
            writes=call.WRITES,
            uses_cwd=True,
        )

    async def call(self, arguments: Mapping[str, Any], context: ToolCallContext) -> ToolResult:
        """Run it in a thread; a file that it cannot use is a result with an error."""
        files = self._stores(context)
        threads = self._threads.writing if self._call.WRITES else self._threads.reading

        def run() -> ToolResult:  # the arguments may be long
            return read_arguments(self._call, arguments).run(files, context)

        try:
            return await threads.run_sync(run)
        except ToolFileError as error:
            return ToolResult.of_error(error.message)

    async def preview(self, arguments: Mapping[str, Any], context: ToolCallContext) -> str | None:
        """Show what it would change; None, too, if it would fail."""
        if not self.info.writes:
            return None
        try:
            files = self._stores(context)
            return await self._threads.reading.run_sync(
                lambda: read_arguments(self._call, arguments).preview(files)
            )
        except TrioServeError:
            return None


class ReadFile(FileCall):
    """The arguments of `read_file`."""

    NAME = "read_file"
    DISPLAY_NAME = "Read file"
    DESCRIPTION = (
        "Read a text file, or a range of its lines. With append_loc, each line begins with its "
        'number, as in "1→...".'
    )

    path: Annotated[str, about("Path of the file")]
    start_line: Annotated[int, about("First line to read; lines count from 1 (default: 1)")] = 1
    end_line: Annotated[int, about("Last line to read, inclusive (default: end of the file)")] = -1
    append_loc: Annotated[bool, about("Begin each line with its number")] = False

    def run(self, files: FileStore, context: ToolCallContext) -> ToolResult:
        path = self.path
        status = files.status(path)
        if status is None:
            raise ToolFileError(f"cannot stat file: {path}")
        if context.response_type == "base64":
            return _read_base64(path, files, status)
        is_part = self.start_line > 1 or self.end_line != -1
        if status.kind == "file" and status.size > _MAX_TEXT and not is_part:
            raise ToolFileError(
                f"file too large ({status.size} bytes, max {_MAX_TEXT}). Use start_line/end_line "
                "to read a portion."
            )
        with files.open(path) as file:
            check_text(file, path)
            return ToolResult.of_text(_read_lines(self, file))


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


def _read_lines(call: ReadFile, file: BufferedReader) -> str:
    parts: list[str] = []
    room = _MAX_TEXT
    for number, line in _lines_from(file, call.start_line):
        if call.end_line != -1 and number > call.end_line:
            break
        prefix = f"{number}→" if call.append_loc else ""
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
    """Lines from number `first` on, without their ends; of a long one the beginning."""
    number = 1
    begins = True
    deadline = time.monotonic() + _MAX_READ_SECONDS
    while piece := file.readline(2 * _MAX_TEXT):
        if begins and number >= first:
            yield number, piece.removesuffix(b"\n")
        begins = piece.endswith(b"\n")
        number += begins
        if number % 4096 == 0 or not begins:
            trio.from_thread.check_cancelled()
            if time.monotonic() > deadline:
                raise ToolFileError(f"it takes too long to get to line {first}")


class WriteFile(FileCall):
    """The arguments of `write_file`."""

    NAME = "write_file"
    DISPLAY_NAME = "Write file"
    DESCRIPTION = (
        "Write a file, and make it and the directories that it is in if they do not exist. To "
        "change a part of a file, use edit_file."
    )
    WRITES = True

    path: Annotated[str, about("Path of the file")]
    content: Annotated[str, about("What to write")]

    def run(self, files: FileStore, context: ToolCallContext) -> ToolResult:
        data = encoded(self.content, "content")
        try:
            diff = self._diff(files)
        except ToolFileError:  # that it cannot be read need not mean that it cannot be written
            diff = None
        files.write(self.path, data)
        answer = {
            "result": "file written successfully",
            "path": shown(self.path),
            "bytes": len(data),
        }
        return ToolResult(answer, diff)

    def preview(self, files: FileStore) -> str:
        encoded(self.content, "content")
        return self._diff(files, MAX_PREVIEW)

    def _diff(self, files: FileStore, most: int = MAX_DIFF) -> str:
        if files.status(self.path) is None:
            return unified_diff(self.path, None, self.content, most)
        with files.open(self.path) as file:
            data = file.read(_MAX_COMPARED + 1)
        if len(data) > _MAX_COMPARED or b"\0" in data:
            return opaque_diff(self.path)
        return unified_diff(self.path, data.decode("utf-8", "replace"), self.content, most)


def encoded(text: str, name: str) -> bytes:
    """The bytes of an argument.

    Raises:
        ToolFileError: it has halves of surrogate pairs.
    """
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise ToolFileError(f"{name} has half of a surrogate pair") from None


class Edit(msgspec.Struct):
    """One replacement of text in a file."""

    old_text: Annotated[
        str,
        about(
            "Text to replace; the file must have it exactly once, and outside of what "
            "other edits replace"
        ),
    ]
    new_text: Annotated[str, about("Text in its place")]


class EditFile(FileCall):
    """The arguments of `edit_file`."""

    NAME = "edit_file"
    DISPLAY_NAME = "Edit file"
    DESCRIPTION = (
        "Edit a file by replacing text. The file must have each edits[].old_text exactly once, "
        "before any of the edits. Edits may not overlap; make one of those that are close to each "
        "other. To replace the whole file, use write_file."
    )
    WRITES = True

    path: Annotated[str, about("Path of the file")]
    edits: Annotated[list[Edit], about(f"Replacements, 1 to {_MAX_EDITS}", max_length=_MAX_EDITS)]

    def run(self, files: FileStore, context: ToolCallContext) -> ToolResult:
        old, new = _edited(self, files)
        files.write(self.path, new.encode("utf-8", "surrogateescape"))
        answer = {
            "result": "file edited successfully",
            "path": shown(self.path),
            "edits_applied": len(self.edits),
        }
        return ToolResult(answer, _diff(self.path, old, new))

    def preview(self, files: FileStore) -> str:
        return _diff(self.path, *_edited(self, files), MAX_PREVIEW)


def _diff(path: str, old: str, new: str, most: int = MAX_DIFF) -> str:
    return unified_diff(path, _printable(old), _printable(new), most)


def _printable(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _edited(call: EditFile, files: FileStore) -> tuple[str, str]:
    """The file's old and new content. Bytes that are not UTF-8 are kept."""
    path = call.path
    _check_edits(call.edits)
    with files.open(path) as file:
        data = file.read(_MAX_EDITED + 1)
    if len(data) > _MAX_EDITED:
        raise ToolFileError(f"file too large to edit: {path} (max {_MAX_EDITED} bytes)")
    old = data.decode("utf-8", "surrogateescape")
    new = with_edits(path, old, call.edits)
    if new == old:
        raise ToolFileError("no changes made: the replacement(s) produced identical content")
    return old, new


def _check_edits(edits: list[Edit]) -> None:
    if not edits:
        raise ToolFileError('"edits" must be a non-empty array')
    for number, edit in enumerate(edits):
        if not edit.old_text:
            raise ToolFileError(f"edits[{number}].old_text must not be empty")
        encoded(edit.old_text, f"edits[{number}].old_text")
        encoded(edit.new_text, f"edits[{number}].new_text")


def with_edits(path: str, text: str, edits: list[Edit]) -> str:
    """The text of a file with all of the edits made.

    Raises:
        ToolFileError: one cannot be made; the message names it.
    """
    # Models write "\n" at the end of lines, whatever ends those of the file.
    has_crlf = "\r\n" in text and text.count("\n") == text.count("\r\n")
    if has_crlf:
        unix = [Edit(_unix(edit.old_text), _unix(edit.new_text)) for edit in edits]
        return with_edits(path, _unix(text), unix).replace("\n", "\r\n")
    normal: _Normal | None = None
    found: list[_Match] = []
    deadline = time.monotonic() + _MAX_EDIT_SECONDS
    for number, edit in enumerate(edits):
        check_cancelled()
        if time.monotonic() >= deadline:
            raise ToolFileError(f"it takes too long to find edits[{number}].old_text in {path}")
        count, begin = _found(text, edit.old_text)
        end = begin + len(edit.old_text)
        if count == 0:
            normal = normal or _Normal.of(text)
            count, begin, end = normal.find(edit.old_text)
        if count == 0:
            raise ToolFileError(
                f"could not find edits[{number}].old_text in {path}, it must match the file's "
                "current content exactly"
            )
        if count > 1:
            raise ToolFileError(
                f"found {count} occurrences of edits[{number}].old_text in {path}, it must be "
                "unique"
            )
        found.append(_Match(begin, end, number))
    found.sort()
    for one, other in pairwise(found):
        if one.end > other.begin:
            raise ToolFileError(
                f"edits[{one.number}] and edits[{other.number}] overlap in {path}; merge them into "
                "one edit or target disjoint regions"
            )
    return "".join(_pieces(text, found, edits))


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")


class _Match(NamedTuple):
    """The place of an edit."""

    begin: int
    end: int
    number: int


def _pieces(text: str, found: Iterable[_Match], edits: list[Edit]) -> Iterable[str]:
    at = 0
    for begin, end, number in found:
        yield text[at:begin]
        yield edits[number].new_text
        at = end
    yield text[at:]


@attrs.frozen
class _Normal:
    """A text without what does not matter, and where each of its lines was in that text."""

    text: str
    lines: list[int]
    places: list[int]

    @classmethod
    def of(cls, text: str) -> _Normal:
        parts, lines, places = [], [], []
        at_normal = at = 0
        for line in text.split("\n"):
            part = line.translate(_ALIKE).rstrip(" \t\r")
            parts.append(part)
            lines.append(at_normal)
            places.append(at)
            at_normal += len(part) + 1
            at += len(line) + 1
        return cls("\n".join(parts), lines, places)

    def find(self, wanted: str) -> tuple[int, int, int]:
        """The number of pieces like this, and the place of the first in the text of `of`."""
        normal = _Normal.of(wanted).text
        count, begin = _found(self.text, normal) if normal else (0, 0)
        return count, self._place_of(begin), self._place_of(begin + len(normal))

    def _place_of(self, at: int) -> int:
        line = bisect_right(self.lines, at) - 1
        return self.places[line] + at - self.lines[line]


def _found(text: str, wanted: str) -> tuple[int, int]:
    """The number of a piece in a text, where it may overlap itself, and the place of the first."""
    begin, count = text.find(wanted), text.count(wanted)
    if count == 1 and text.find(wanted, begin + 1) >= 0:
        count = 2
    return count, begin
