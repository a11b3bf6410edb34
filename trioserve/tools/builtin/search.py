"""`file_glob_search` finds files by their paths, `grep_search` the lines that match a pattern."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Annotated, get_args

import attrs
import trio

from trioserve.errors import ToolFileError
from trioserve.tools.builtin.file_tools import FileCall, check_text
from trioserve.tools.files.patterns import Filter, LinePattern, shown
from trioserve.tools.files.store import DirectoryEntry, DirectoryListing, FileStore, Kinds
from trioserve.tools.tool import ToolCallContext, ToolResult, about

_MAX_RESULTS = 100

_MAX_MATCHES = 100
_MAX_CONTEXT = 100  # lines before a match, and as many after it
_MAX_LINE = 1000  # bytes that are shown of a line
_MAX_OUTPUT = 2**16
_MAX_FILE = 32 * 2**20
_MAX_SECONDS = 30.0


class FindFiles(FileCall):
    """Finds files by their names."""

    NAME = "file_glob_search"
    DISPLAY_NAME = "File search"
    DESCRIPTION = (
        "Search a directory, and all below it, for files that match a glob. Files that .gitignore "
        "names are skipped in a Git repository; elsewhere, directories such as node_modules and "
        'build are not searched. A glob without "/", as "*.cpp", matches names at any depth; one '
        'with "/" matches paths, at any depth, too, unless it begins with "/". With type="dir" or '
        '"all", directories are returned as well, with a "/" at the end; .gitignore does not '
        "matter then."
    )

    path: Annotated[str, about("Directory to search in")]
    include: Annotated[
        str, about('Glob of what to include, as "*.cpp" or "src/**/*.cpp" (default: **)')
    ] = "**"
    exclude: Annotated[str, about("Glob of what to exclude")] = ""
    type: Annotated[str, about('What to return: "file" (default), "dir" or "all"')] = "file"
    max_depth: Annotated[
        int, about("How deep to search (default: 0 = no limit; 1 = only in this directory)")
    ] = 0
    limit: Annotated[
        int, about(f"Number of results (at most {_MAX_RESULTS}, which is the default)")
    ] = _MAX_RESULTS

    def run(self, files: FileStore, context: ToolCallContext) -> ToolResult:
        if self.limit < 1:
            raise ToolFileError(f"invalid limit: {self.limit} (expected 1 or more)")
        wanted = Filter(self.include, self.exclude)
        listing = files.list(self.path, _kinds(self.type), max(0, self.max_depth))
        found, total = _first_entries(listing, wanted, min(self.limit, _MAX_RESULTS))
        lines = [f"{shown(one.path)}{'/' if one.is_dir else ''}\n" for one in found]
        text = "".join(lines) + f"\n---\nTotal matches: {total}\n"
        if total > len(found):
            text += (
                f"[{len(found)} results limit reached ({total} total matches). Refine the glob "
                "pattern to narrow the search.]\n"
            )
        if listing.truncated:
            text += "[results truncated: time budget or unreadable directory]\n"
        entries = [
            {"path": shown(one.path), "type": "dir" if one.is_dir else "file"} for one in found
        ]
        base = shown(files.resolve(self.path))
        return ToolResult({"plain_text_response": text, "entries": entries, "base": base})


def _kinds(name: str) -> Kinds:
    for kinds in get_args(Kinds):
        if kinds == name:
            return kinds  # type: ignore[no-any-return]
    raise ToolFileError(f'invalid type: {name} (expected "file", "dir" or "all")')


def _first_entries(
    listing: DirectoryListing, wanted: Filter, limit: int
) -> tuple[list[DirectoryEntry], int]:
    found: list[DirectoryEntry] = []
    total = 0
    deadline = time.monotonic() + _MAX_SECONDS
    for entry in listing.entries:
        trio.from_thread.check_cancelled()
        if time.monotonic() >= deadline:
            listing.truncated = True
            break
        if wanted.has(entry.path):
            total += 1
            if total <= limit:
                found.append(entry)
    return found, total


class GrepFiles(FileCall):
    """The arguments of `grep_search`."""

    NAME = "grep_search"
    DISPLAY_NAME = "Grep search"
    DESCRIPTION = (
        "Search a file, or the files in a directory and below, for lines that match a pattern. "
        "Returns each with the path of its file, relative to the directory. Files that .gitignore "
        "names are skipped in a Git repository; elsewhere, directories such as node_modules and "
        'build are not searched. A glob without "/" matches names at any depth; one with "/" '
        "matches paths."
    )

    path: Annotated[str, about("File or directory to search in")]
    pattern: Annotated[str, about("Regular expression (RE2), or plain text if literal is true")]
    include: Annotated[str, about("Glob of the files to search (default: **)")] = "**"
    exclude: Annotated[str, about("Glob of files not to search")] = ""
    return_line_numbers: Annotated[bool, about("Return the numbers of lines")] = False
    literal: Annotated[bool, about("Take the pattern as plain text")] = False
    ignore_case: Annotated[bool, about("Ignore case")] = False
    context_lines: Annotated[
        int, about("Lines to return before and after each match (default: 0)")
    ] = 0

    def run(self, files: FileStore, context: ToolCallContext) -> ToolResult:
        pattern = LinePattern(self.pattern, literal=self.literal, ignore_case=self.ignore_case)
        search = _Search(self, pattern, files)
        status = files.status(self.path)
        if status is None:
            raise ToolFileError(f"path does not exist: {self.path}")
        if status.kind == "dir":
            search.in_folder()
        else:
            search.in_file(self.path, shown(self.path))
        return ToolResult.of_text(search.answer())


@attrs.define
class _Search:
    call: GrepFiles
    pattern: LinePattern
    files: FileStore
    deadline: float = attrs.field(factory=lambda: time.monotonic() + _MAX_SECONDS)
    parts: list[str] = attrs.field(factory=list)
    n_bytes: int = 0
    n_matches: int = 0
    n_too_large: int = 0
    is_full: bool = False
    truncated: bool = False

    def in_folder(self) -> None:
        """Search the files below a directory; those that cannot be searched are skipped."""
        wanted = Filter(self.call.include, self.call.exclude)
        listing = self.files.list(self.call.path, "file", 0)
        base = self.files.resolve(self.call.path).rstrip("/")
        for entry in listing.entries:
            if self.is_full or not self.may_go_on():
                return
            if not wanted.has(entry.path):
                continue
            try:
                self.in_file(f"{base}/{entry.path}", shown(entry.path))
            except ToolFileError:
                continue
        self.truncated |= listing.truncated

    def may_go_on(self) -> bool:
        """Check that time is left. Raises Cancelled when the caller is cancelled."""
        trio.from_thread.check_cancelled()
        self.truncated = time.monotonic() >= self.deadline
        return not self.truncated

    def in_file(self, path: str, name: str) -> None:
        """Search one file. Raises ToolFileError if it cannot be read as text."""
        with self.files.open(path) as file:
            check_text(file, path)
            data = file.read(_MAX_FILE + 1)
        if len(data) > _MAX_FILE:
            self.n_too_large += 1
            return
        if b"\r\n" in data:
            data = data.replace(b"\r\n", b"\n")
        find = partial(self.pattern.find, data, may_go_on=self.may_go_on)
        for number, begin, end in _matches(data, find):
            if self.n_matches >= _MAX_MATCHES or self.n_bytes >= _MAX_OUTPUT:
                self.is_full = True
                return
            self.n_matches += 1
            self._show(name, data, number, (begin, end))

    def _show(self, name: str, data: bytes, number: int, match: tuple[int, int]) -> None:
        n_context = min(max(0, self.call.context_lines), _MAX_CONTEXT)
        before, lines = _around(data, match, n_context)
        for place, line in enumerate(lines, number - before):
            mark = ":" if place == number else "-"
            shows_number = self.call.return_line_numbers or n_context > 0
            prefix = name + mark + (f"{place}{mark}" if shows_number else "")
            self._add(f"{prefix}{_shortened(line)}\n")
        if n_context > 0:
            self._add("--\n")

    def _add(self, text: str) -> None:
        self.parts.append(text)
        self.n_bytes += len(text)

    def answer(self) -> str:
        text = "".join(self.parts) + f"\n---\nTotal matches: {self.n_matches}\n"
        if self.is_full:
            text += (
                f"[{self.n_matches} matches limit reached. Narrow the path/pattern/include to see "
                "more.]\n"
            )
        if self.n_too_large:
            text += f"[{self.n_too_large} files of more than {_MAX_FILE} bytes were not searched]\n"
        if self.pattern.has_skipped:
            text += (
                f"[lines of more than {self.pattern.max_line} bytes were not searched; a shorter "
                "pattern finds longer lines]\n"
            )
        if self.truncated:
            text += "[results truncated: time budget or unreadable directory]\n"
        return text


def _matches(data: bytes, find: Callable[[int], int | None]) -> Iterator[tuple[int, int, int]]:
    """The lines that match: the number of each, where it begins, and where it ends."""
    stop = len(data) - data.endswith(b"\n") if data else -1
    number, begin, at = 1, 0, 0
    while at <= stop:
        found = find(at)
        if found is None or found > stop:
            return
        line = data.rfind(b"\n", 0, found) + 1
        number += data.count(b"\n", begin, line)
        begin = line
        end = data.find(b"\n", found)
        end = len(data) if end < 0 else end
        yield number, begin, end
        at = end + 1


def _around(data: bytes, match: tuple[int, int], n_context: int) -> tuple[int, list[bytes]]:
    """The line of a match with those around it, and how many are before it."""
    begin, end = match
    before = 0
    while before < n_context and begin > 0:
        begin = data.rfind(b"\n", 0, begin - 1) + 1
        before += 1
    for _ in range(n_context):
        if end >= len(data) - 1:  # where a newline ends the last line
            break
        following = data.find(b"\n", end + 1)
        end = len(data) if following < 0 else following
    return before, data[begin:end].split(b"\n")


def _shortened(line: bytes) -> str:
    if len(line) <= _MAX_LINE:
        return line.decode("utf-8", "replace")
    return f"{line[:_MAX_LINE].decode('utf-8', 'ignore')} [{len(line)} bytes]"
