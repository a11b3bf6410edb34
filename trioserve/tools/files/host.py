"""`HostFiles`: the files of this machine, inside a sandbox.

A directory is listed for a limited time, without following links, and without what .gitignore
files name. Git itself is not asked: it runs programs that the configuration of a repository names,
and tools may write that.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from io import BufferedReader
from itertools import islice
from pathlib import Path
from typing import Literal

import attrs
import re2
import trio
from pathspec import GitIgnoreSpec
from pathspec.patterns.gitignore import GitIgnorePatternError

from trioserve.errors import ToolFileError
from trioserve.tools.files.patterns import shown
from trioserve.tools.files.store import (
    DirectoryEntry,
    DirectoryListing,
    FileStatus,
    FileStore,
    Kinds,
)
from trioserve.tools.sandbox import PathSandbox, open_regular

_MAX_BYTES = 2**16  # of one .gitignore file
_MAX_LINES = 2000

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


class Ignored:
    """The .gitignore files from the top of a repository down. They are read when first needed."""

    def __init__(self, sandbox: PathSandbox, top: str, base: str) -> None:
        self._sandbox = sandbox
        self._top = top
        self._base = "" if base == top else f"{Path(base).relative_to(top)}/"
        self._specs: dict[str, list[GitIgnoreSpec]] = {}

    @classmethod
    def around(cls, sandbox: PathSandbox, base: str) -> Ignored | None:
        """The ignored files of the repository around a directory; None if the sandbox has none."""
        for top in (Path(base), *Path(base).parents):
            if not _is_inside(sandbox, str(top)):
                return None
            if os.path.lexists(top / ".git"):
                ignored = cls(sandbox, str(top), base)
                return None if ignored._has(ignored._base) else ignored
        return None

    def has(self, path: str, *, is_dir: bool) -> bool:
        """Test a path that no ignored directory is above."""
        return self._has(f"{self._base}{path}/" if is_dir else self._base + path)

    def _has(self, path: str) -> bool:
        """Test a path from the top. The innermost file with a rule for it decides."""
        folder = path.rstrip("/")
        while folder:
            folder = folder.rpartition("/")[0]
            name = shown(path[len(folder) :].lstrip("/"))
            for spec in self._specs_of(folder):
                if (include := spec.check_file(name).include) is not None:
                    return include
        return False

    def _specs_of(self, folder: str) -> list[GitIgnoreSpec]:
        if folder not in self._specs:
            usable = [one for one in self._lines_of(folder) if one.strip() and _is_pattern(one)]
            self._specs[folder] = _specs_of(usable)
        return self._specs[folder]

    def _lines_of(self, folder: str) -> list[str]:
        names = [".gitignore"] if folder else [".git/info/exclude", ".gitignore"]
        return [line for name in names for line in self._read(os.path.join(folder, name))]

    def _read(self, path: str) -> list[str]:
        try:
            with open(self._sandbox.open_file(os.path.join(self._top, path)), "rb") as file:
                text = file.read(_MAX_BYTES).decode("utf-8", "replace")
        except (OSError, ToolFileError):
            return []
        return text.splitlines()[:_MAX_LINES]


def _specs_of(lines: list[str]) -> list[GitIgnoreSpec]:
    """The patterns in as few sets as RE2 can make of them. The first set with a match decides."""
    if not lines:
        return []
    try:
        # RE2 takes linear time for any expression that a model writes.
        return [GitIgnoreSpec.from_lines(lines, backend="re2")]
    except re2.error:  # together, they take more memory than RE2 may have
        half = len(lines) // 2
        return _specs_of(lines[half:]) + _specs_of(lines[:half])


def _is_pattern(line: str) -> bool:
    try:
        GitIgnoreSpec.from_lines([line], backend="re2")
    except (GitIgnorePatternError, re.error, re2.error):
        return False
    return True


def _is_inside(sandbox: PathSandbox, real: str) -> bool:
    try:
        sandbox.resolve(real)
    except ToolFileError:
        return False
    return True


@attrs.define
class _Walk:
    sandbox: PathSandbox
    base: str
    kinds: Kinds
    max_depth: int
    #: None: outside of a Git repository, or it does not matter.
    ignored: Ignored | None
    deadline: float = attrs.field(factory=lambda: time.monotonic() + _MAX_SECONDS)


def list_folder(sandbox: PathSandbox, base: str, kinds: Kinds, max_depth: int) -> DirectoryListing:
    """List the directory of this real path, and those below it.

    Names come in order, those in a directory before what is below it.
    """
    ignored = Ignored.around(sandbox, base) if kinds == "file" else None
    listing = DirectoryListing(iter(()))
    listing.entries = _entries(_Walk(sandbox, base, kinds, max_depth, ignored), listing)
    return listing


def _entries(walk: _Walk, listing: DirectoryListing) -> Iterator[DirectoryEntry]:
    waiting = [""]
    while waiting:
        folder = waiting.pop()
        below = []
        for entry, may_enter in _entries_of(walk, folder, listing):
            trio.from_thread.check_cancelled()
            if time.monotonic() >= walk.deadline:
                listing.truncated = True
                return
            if may_enter:
                below.append(entry.path)
            if walk.kinds == "all" or entry.is_dir == (walk.kinds == "dir"):
                yield entry
        waiting.extend(reversed(below))


def _entries_of(
    walk: _Walk, folder: str, listing: DirectoryListing
) -> Iterator[tuple[DirectoryEntry, bool]]:
    """The entries of one directory, and whether to go through each."""
    prefix = folder + "/" if folder else ""
    may_go_deeper = not walk.max_depth or prefix.count("/") + 1 < walk.max_depth
    for name, kind in sorted(_scan(walk, folder, listing).items()):
        path, is_dir = prefix + name, kind != "file"
        if walk.ignored is not None and walk.ignored.has(path, is_dir=is_dir):
            continue
        # In a repository, .gitignore names generated files.
        is_junk = name == ".git" if walk.ignored is not None else name in JUNK
        yield DirectoryEntry(path, is_dir), kind == "dir" and may_go_deeper and not is_junk


def _scan(walk: _Walk, folder: str, listing: DirectoryListing) -> dict[str, _Kind]:
    trio.from_thread.check_cancelled()
    found: dict[str, _Kind] = {}
    try:
        real = os.path.join(walk.base, folder)
        with _open_to_scan(walk.sandbox, real) as opened, os.scandir(opened) as entries:
            looked_at = islice(entries, _MAX_ENTRIES)
            found.update(
                (entry.name, kind)
                for entry in looked_at
                if (kind := _kind_of(walk, folder, entry)) is not None
            )
            listing.truncated |= next(entries, None) is not None
    except OSError:
        listing.truncated = True  # it cannot be read, or was deleted
    return found


@contextmanager
def _open_to_scan(sandbox: PathSandbox, real: str) -> Iterator[int]:
    with sandbox.open_folder(real.rstrip(os.sep) or os.sep) as passage:
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
            walk.sandbox.resolve(os.path.join(walk.base, folder, entry.name))
        if entry.is_dir():
            return "link" if is_link else "dir"
        return "file" if entry.is_file() else None
    except (OSError, ToolFileError):
        return None


class HostFiles(FileStore):
    """The files of this machine that are inside a sandbox."""

    def __init__(self, sandbox: PathSandbox, cwd: str | None = None) -> None:
        """Begin relative paths in `cwd`, or else in the sandbox's default directory.

        All methods raise InvalidRequestError if `cwd` is no directory inside the sandbox.
        """
        self._sandbox = sandbox
        self._cwd = cwd

    @cached_property
    def _begin(self) -> str:
        return self._sandbox.folder(self._cwd)

    def resolve(self, path: str) -> str:
        return self._sandbox.resolve(path, self._begin)

    def status(self, path: str) -> FileStatus | None:
        real = self.resolve(path)
        try:
            status = self._sandbox.status(real)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _failed("cannot stat file", path, error) from None
        if stat.S_ISDIR(status.st_mode):
            return FileStatus("dir", status.st_size)
        return FileStatus("file" if stat.S_ISREG(status.st_mode) else "other", status.st_size)

    def open(self, path: str) -> BufferedReader:
        real = self.resolve(path)
        try:
            return open(self._sandbox.open_file(real), "rb")
        except OSError as error:
            raise _failed("failed to open file", path, error) from None

    def write(self, path: str, data: bytes) -> None:
        """Make or replace a file, all of it or nothing. One that is replaced keeps its mode and
        owner."""
        real = self.resolve(path)
        try:
            with self._sandbox.open_parent(real, create=True) as (folder, name):
                _write(name, data, folder)
        except OSError as error:
            raise _failed("failed to write file", path, error) from None

    def list(self, path: str, kinds: Kinds, max_depth: int) -> DirectoryListing:
        real = self.resolve(path)
        if not os.path.isdir(real):
            raise ToolFileError(f"path does not exist or is not a directory: {path}")
        return list_folder(self._sandbox, real, kinds, max_depth)


def _failed(what: str, path: str, error: OSError) -> ToolFileError:
    return ToolFileError(f"{what}: {path} ({error.strerror or error})")


def _write(name: str, data: bytes, folder: int) -> None:
    try:
        # A user who may not write to a file may not replace it, either.
        old = open_regular(name, os.O_WRONLY, folder)
    except FileNotFoundError:
        _replace(name, data, folder, None)
        return
    try:
        if not _replace(name, data, folder, os.fstat(old)):
            os.truncate(old, 0)
            with open(old, "wb", closefd=False) as file:
                file.write(data)
    finally:
        os.close(old)


def _replace(name: str, data: bytes, folder: int, old: os.stat_result | None) -> bool:
    """Replace the old file by a new one, if that can have the same owner."""
    temporary = f".trioserve-{secrets.token_hex(8)}.tmp"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    new = os.open(temporary, flags, 0o666 if old is None else 0o600, dir_fd=folder)
    try:
        with open(new, "wb") as file:
            if old is not None and not _copy_owner(old, new):
                return False
            file.write(data)
        os.rename(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)
        temporary = ""
    finally:
        if temporary:
            os.unlink(temporary, dir_fd=folder)
    return True


def _copy_owner(old: os.stat_result, new: int) -> bool:
    """Give a file the owner and the mode of another; returns whether that is allowed."""
    try:
        os.fchown(new, old.st_uid, old.st_gid)
    except PermissionError:
        return False
    os.fchmod(new, stat.S_IMODE(old.st_mode))
    return True
