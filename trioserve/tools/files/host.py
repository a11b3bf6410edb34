"""`HostFiles`: the files of this machine, inside a fence."""

from __future__ import annotations

import os
import secrets
import stat
from functools import cached_property
from io import BufferedReader

from trioserve.errors import ToolFileError
from trioserve.tools.files.store import FileStatus, FileStore, Kinds, Listing
from trioserve.tools.files.walk import list_folder
from trioserve.tools.paths import Fence, open_regular


class HostFiles(FileStore):
    """The files of this machine that are inside a fence."""

    def __init__(self, fence: Fence, cwd: str | None = None) -> None:
        """Begin relative paths in `cwd`, or else where the fence says.

        All methods raise InvalidRequestError if `cwd` is no directory inside the fence.
        """
        self._fence = fence
        self._cwd = cwd

    @cached_property
    def _begin(self) -> str:
        return self._fence.folder(self._cwd)

    def resolve(self, path: str) -> str:
        """The real path of what `path` names."""
        return self._fence.resolve(path, self._begin)

    def status(self, path: str) -> FileStatus | None:
        """What is at a path; None: nothing."""
        real = self.resolve(path)
        try:
            status = self._fence.status(real)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise _failed("cannot stat file", path, error) from None
        if stat.S_ISDIR(status.st_mode):
            return FileStatus("dir", status.st_size)
        return FileStatus("file" if stat.S_ISREG(status.st_mode) else "other", status.st_size)

    def open(self, path: str) -> BufferedReader:
        """Open a regular file for reading."""
        real = self.resolve(path)
        try:
            return open(self._fence.open_file(real), "rb")
        except OSError as error:
            raise _failed("failed to open file", path, error) from None

    def write(self, path: str, data: bytes) -> None:
        """Make or replace a file, all of it or nothing. One that is replaced keeps its mode and
        owner."""
        real = self.resolve(path)
        try:
            with self._fence.open_parent(real, create=True) as (folder, name):
                _write(name, data, folder)
        except OSError as error:
            raise _failed("failed to write file", path, error) from None

    def list(self, path: str, kinds: Kinds, max_depth: int) -> Listing:
        """List a directory, and what is below it."""
        real = self.resolve(path)
        if not os.path.isdir(real):
            raise ToolFileError(f"path does not exist or is not a directory: {path}")
        return list_folder(self._fence, real, kinds, max_depth)


def _failed(what: str, path: str, error: OSError) -> ToolFileError:
    return ToolFileError(f"{what}: {path} ({error.strerror or error})")


def _write(name: str, data: bytes, folder: int) -> None:
    try:
        # Whoever may not write to a file may not replace it, either.
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
    """Put a new file in the place of the old one, if it can have its owner."""
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
    """Give a file the owner and the mode of another, or tell that this is not allowed."""
    try:
        os.fchown(new, old.st_uid, old.st_gid)
    except PermissionError:
        return False
    os.fchmod(new, stat.S_IMODE(old.st_mode))
    return True
