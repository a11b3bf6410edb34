"""`file_glob_search`: the files and directories whose paths match a glob."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, get_args

import msgspec
from msgspec import Meta

from trioserve.errors import ToolFileError
from trioserve.tools.builtin.file_tool import FileTool
from trioserve.tools.files.patterns import Filter, shown
from trioserve.tools.files.store import Entry, FileStore, Kinds, Listing
from trioserve.tools.tool import ToolCallContext, ToolResult

_MAX_RESULTS = 100


class FindArguments(msgspec.Struct):
    """What `file_glob_search` looks for."""

    path: Annotated[str, Meta(description="Directory to search in")]
    include: Annotated[
        str,
        Meta(description='Glob of what to include, as "*.cpp" or "src/**/*.cpp" (default: **)'),
    ] = "**"
    exclude: Annotated[str, Meta(description="Glob of what to exclude")] = ""
    type: Annotated[str, Meta(description='What to return: "file" (default), "dir" or "all"')] = (
        "file"
    )
    max_depth: Annotated[
        int,
        Meta(description="How deep to search (default: 0 = no limit; 1 = only in this directory)"),
    ] = 0
    limit: Annotated[
        int, Meta(description=f"Number of results (at most {_MAX_RESULTS}, which is the default)")
    ] = _MAX_RESULTS


class FindFiles(FileTool[FindArguments]):
    """Finds files by their names."""

    ARGUMENTS = FindArguments
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

    def run(
        self, arguments: FindArguments, files: FileStore, context: ToolCallContext
    ) -> ToolResult:
        """Search."""
        if arguments.limit < 1:
            raise ToolFileError(f"invalid limit: {arguments.limit} (expected 1 or more)")
        wanted = Filter(arguments.include, arguments.exclude)
        listing = files.list(arguments.path, _kinds(arguments.type), max(0, arguments.max_depth))
        found, total = _first(listing, wanted, min(arguments.limit, _MAX_RESULTS))
        text = "".join(_lines(found)) + f"\n---\nTotal matches: {total}\n"
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
        base = shown(files.resolve(arguments.path))
        return ToolResult({"plain_text_response": text, "entries": entries, "base": base})


def _kinds(name: str) -> Kinds:
    for kinds in get_args(Kinds):
        if kinds == name:
            return kinds  # type: ignore[no-any-return]
    raise ToolFileError(f'invalid type: {name} (expected "file", "dir" or "all")')


def _first(listing: Listing, wanted: Filter, limit: int) -> tuple[list[Entry], int]:
    """The first entries that match, and how many match."""
    found: list[Entry] = []
    total = 0
    for entry in listing.entries:
        if wanted.has(entry.path):
            total += 1
            if total <= limit:
                found.append(entry)
    return found, total


def _lines(entries: Iterable[Entry]) -> Iterable[str]:
    return (f"{shown(one.path)}{'/' if one.is_dir else ''}\n" for one in entries)
