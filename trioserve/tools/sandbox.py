"""`PathSandbox`: the directories that tools may use, and how a path gets to a file inside them."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trioserve.errors import InvalidRequestError, ToolFileError

_DIRECTORY = os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Opens a directory to look up names in it, which needs no permission to list it.
_PASSAGE = _DIRECTORY | getattr(os, "O_PATH", os.O_RDONLY)

_MAX_PATH = 4095  # bytes: the kernel's


class PathSandbox:
    """Directories and their contents. Nothing else can be opened through it.

    A path may lead through ``..`` and symbolic links, as long as what it names is inside. What is
    opened is reached from the directory one name at a time, and without following links, so that
    a link that appears after the path was looked at leads nowhere.
    """

    def __init__(self, folders: Iterable[str] = ()) -> None:
        """Put a sandbox around `folders`; without any, around the current directory."""
        real = [os.path.realpath(folder) for folder in folders or [os.curdir]]
        #: The directories, by their real paths.
        self.folders = tuple(dict.fromkeys(real))

    @property
    def is_open(self) -> bool:
        return os.sep in self.folders

    @property
    def home(self) -> str:
        """The default beginning of relative paths: the current directory if it is inside."""
        try:
            here = os.getcwd()
        except FileNotFoundError:  # it was removed
            return self.folders[0]
        return here if self._folder_of(here) is not None else self.folders[0]

    def resolve(self, path: str, cwd: str | None = None) -> str:
        """The real path of `path`, which need not exist. It begins in `cwd`.

        Raises:
            ToolFileError: it is outside, or no valid path.
        """
        _check_path(path)
        if path == "~" or path.startswith("~/"):
            path = os.path.expanduser(path)
        real = _real_path(os.path.join(cwd or self.home, path))
        if self._folder_of(real) is None:
            raise ToolFileError(
                f"{path} is outside of the directories that tools may use (--tools-dir): "
                + ", ".join(self.folders)
            )
        return real

    def folder(self, cwd: str | None) -> str:
        """The real path of the directory that a call names as its own; None: `home`.

        Raises:
            InvalidRequestError: it is outside, or no directory. The `param` is "cwd".
        """
        if cwd is None:
            return self.home
        try:
            real = self.resolve(cwd)
        except ToolFileError as error:
            raise InvalidRequestError(f"cwd: {error.message}", param="cwd") from None
        if not os.path.isdir(real):
            raise InvalidRequestError(f"cwd: {cwd} is not a directory", param="cwd")
        return real

    @contextmanager
    def open_folder(self, real: str, *, create: bool = False) -> Iterator[int]:
        """Open a directory, by what `resolve` gave, as a descriptor for the ``dir_fd`` of others.

        Args:
            real: its path.
            create: make the directories that are not there.

        Raises:
            OSError: it is not there, or one of its names has become a link.
            ToolFileError: it is outside.
        """
        root = self._folder_of(real)
        if root is None:
            raise ToolFileError(f"{real} is outside of the directories that tools may use")
        folder = os.open(root, _PASSAGE)
        try:
            for name in Path(real).relative_to(root).parts:
                if create:
                    _make_folder(name, folder)
                inner = os.open(name, _PASSAGE, dir_fd=folder)
                os.close(folder)
                folder = inner
            yield folder
        finally:
            os.close(folder)

    @contextmanager
    def open_parent(self, real: str, *, create: bool = False) -> Iterator[tuple[int, str]]:
        """Open the directory of a file, and give its name. Like `open_folder`."""
        if real in self.folders:
            raise OSError("Is a directory")
        with self.open_folder(os.path.dirname(real), create=create) as folder:
            yield folder, os.path.basename(real)

    def status(self, real: str) -> os.stat_result:
        """The entry at a path that `resolve` gave.

        Raises:
            OSError: nothing, or one of its names has become a link.
            ToolFileError: it is outside.
        """
        if real in self.folders:
            return os.stat(real)
        with self.open_parent(real) as (folder, name):
            return os.stat(name, dir_fd=folder, follow_symlinks=False)

    def open_file(self, real: str) -> int:
        """Open a regular file for reading, by what `resolve` gave. Never waits for a FIFO.

        Raises:
            OSError: it is not there, may not be read, or is no regular file.
            ToolFileError: it is outside.
        """
        with self.open_parent(real) as (folder, name):
            return open_regular(name, os.O_RDONLY, folder)

    def _folder_of(self, real: str) -> str | None:
        path = os.path.join(real, "")
        inside = (one for one in self.folders if path.startswith(os.path.join(one, "")))
        return next(inside, None)


def open_regular(name: str, flags: int, folder: int) -> int:
    """Open a regular file in an open directory; devices and FIFOs are not touched.

    Raises:
        OSError: it is not there, may not be opened, or is no regular file.
    """
    _check_regular(os.stat(name, dir_fd=folder, follow_symlinks=False))
    flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    opened = os.open(name, flags, dir_fd=folder)
    try:
        _check_regular(os.fstat(opened))  # another one may have taken its place
    except OSError:
        os.close(opened)
        raise
    return opened


def _check_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        is_folder = stat.S_ISDIR(status.st_mode)
        raise OSError("Is a directory" if is_folder else "Not a regular file")


def _make_folder(name: str, folder: int) -> None:
    with suppress(FileExistsError):  # of something else, too, which cannot be opened then
        os.mkdir(name, dir_fd=folder)


def _real_path(path: str) -> str:
    try:
        os.stat(path)  # the kernel gives up early where links lead to ever more links
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ToolFileError(f"there are too many symbolic links: {path}") from None
    try:
        return os.path.realpath(path)
    except RecursionError:
        raise ToolFileError(f"there are too many symbolic links: {path}") from None
    except OSError as error:  # at this moment, something became a link, or stopped being one
        raise ToolFileError(f"{path}: {error.strerror}") from None


def _check_path(path: str) -> None:
    if "\0" in path:
        raise ToolFileError("a path cannot have a NUL character")
    try:
        n_bytes = len(os.fsencode(path))
    except UnicodeEncodeError:
        raise ToolFileError("a path has characters that no name can have") from None
    if n_bytes > _MAX_PATH:
        raise ToolFileError(f"a path of {n_bytes} bytes is too long: {_MAX_PATH} are possible")
