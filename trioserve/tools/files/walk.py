"""Going through a directory and all that is below it, for a limited time and without following
links."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from typing import Literal

import attrs
import trio

from trioserve.errors import ToolFileError
from trioserve.tools.files.ignored import Ignored
from trioserve.tools.files.store import Entry, Kinds, Listing
from trioserve.tools.paths import Fence

#: Directories that are named and not entered, since they can be enormous: llama-server's.
# fmt: off
JUNK = frozenset({
    ".git", ".svn", ".hg", "node_modules", "__pycache__",
    ".venv", "venv", "dist", "build", "target", ".cache", ".idea", ".vscode",
})
# fmt: on

_MAX_SECONDS = 15.0
#: Of one directory, so that its names fit into memory.
_MAX_ENTRIES = 100_000

#: "link": one to a directory.
_Kind = Literal["file", "dir", "link"]


@attrs.define
class _Walk:
    fence: Fence
    base: str
    kinds: Kinds
    max_depth: int
    #: None: outside of a Git repository, or it does not matter.
    ignored: Ignored | None
    deadline: float = attrs.field(factory=lambda: time.monotonic() + _MAX_SECONDS)


def list_folder(fence: Fence, base: str, kinds: Kinds, max_depth: int) -> Listing:
    """List what is in the directory of this real path, and below it.

    Names come in order, those in a directory before what is below it.
    """
    ignored = Ignored.around(fence, base) if kinds == "file" else None
    listing = Listing(iter(()))
    listing.entries = _entries(_Walk(fence, base, kinds, max_depth, ignored), listing)
    return listing


def _entries(walk: _Walk, listing: Listing) -> Iterator[Entry]:
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        below = []
        for entry, may_enter in _entries_of(walk, folder, listing):
            if time.monotonic() >= walk.deadline:
                listing.truncated = True
                return
            if may_enter:
                below.append(entry.path)
            if walk.kinds == "all" or entry.is_dir == (walk.kinds == "dir"):
                yield entry
        waiting.extend(reversed(below))


def _entries_of(walk: _Walk, folder: str, listing: Listing) -> Iterator[tuple[Entry, bool]]:
    """What is in one directory, and whether to go through it as well."""
    prefix = folder + "/" if folder else ""
    may_go_deeper = not walk.max_depth or prefix.count("/") + 1 < walk.max_depth
    for name, kind in sorted(_scan(walk, folder, listing).items()):
        path, is_dir = prefix + name, kind != "file"
        if walk.ignored is not None and walk.ignored.has(path, is_dir=is_dir):
            continue
        # In a repository, .gitignore says what programs have made.
        is_junk = name == ".git" if walk.ignored is not None else name in JUNK
        yield Entry(path, is_dir), kind == "dir" and may_go_deeper and not is_junk


def _scan(walk: _Walk, folder: str, listing: Listing) -> dict[str, _Kind]:
    """The names in a directory, and of what kind each is."""
    trio.from_thread.check_cancelled()
    found: dict[str, _Kind] = {}
    try:
        real = os.path.join(walk.base, folder)
        with _open_to_scan(walk.fence, real) as opened, os.scandir(opened) as entries:
            looked_at = islice(entries, _MAX_ENTRIES)
            found.update(
                (entry.name, kind)
                for entry in looked_at
                if (kind := _kind_of(walk, folder, entry)) is not None
            )
            listing.truncated |= next(entries, None) is not None
    except OSError:
        listing.truncated = True  # it may not be read, or is gone
    return found


@contextmanager
def _open_to_scan(fence: Fence, real: str) -> Iterator[int]:
    with fence.open_folder(real.rstrip(os.sep) or os.sep) as passage:
        opened = os.open(os.curdir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=passage)
    try:
        yield opened
    finally:
        os.close(opened)


def _kind_of(walk: _Walk, folder: str, entry: os.DirEntry[str]) -> _Kind | None:
    """None: it is neither a file nor a directory, or a link that leads outside."""
    try:
        is_link = entry.is_symlink()
        if is_link:
            walk.fence.resolve(os.path.join(walk.base, folder, entry.name))
        if entry.is_dir():
            return "link" if is_link else "dir"
        return "file" if entry.is_file() else None
    except (OSError, ToolFileError):
        return None
