"""`FileStore`: files on this machine, in a container, or on another host."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from io import BufferedReader
from typing import Literal

import attrs

from trioserve.tools.tool import ToolCallContext

#: Entries that a search lists: regular files, directories, or both.
Kinds = Literal["file", "dir", "all"]


@attrs.frozen
class FileStatus:
    """An entry of a directory."""

    kind: Literal["file", "dir", "other"]
    size: int


@attrs.frozen
class DirectoryEntry:
    """A file or directory in a directory that was listed."""

    #: Relative to that directory, with ``/`` between the names.
    path: str
    is_dir: bool


@attrs.define
class DirectoryListing:
    """The entries of a directory and below, one after another."""

    entries: Iterator[DirectoryEntry]
    #: Something could not be listed, or there was no time for it; known at the end.
    truncated: bool = False


class FileStore(ABC):
    """Files somewhere, and the directory that relative paths begin in.

    Its methods block, so they are called in worker threads, where `trio.from_thread` works. They
    look now and then whether the call was cancelled. A path may be anything that JSON can say.
    All raise ToolFileError, with a sentence for the model, when they cannot do what is asked.
    """

    @abstractmethod
    def resolve(self, path: str) -> str:
        """The absolute path of `path`, whether it exists or not."""

    @abstractmethod
    def status(self, path: str) -> FileStatus | None:
        """The entry at a path; None: nothing."""

    @abstractmethod
    def open(self, path: str) -> BufferedReader:
        """Open a regular file for reading. A store elsewhere may end at its first 64 MiB."""

    @abstractmethod
    def write(self, path: str, data: bytes) -> None:
        """Write these bytes to a file. Creates or replaces it, and creates its directories."""

    @abstractmethod
    def list(self, path: str, kinds: Kinds, max_depth: int) -> DirectoryListing:
        """List a directory, and those below it down to `max_depth`; 0 = all of them.

        Directories with what programs have made, such as ``build``, are named and not entered.
        Files are not listed that .gitignore names, if only files are asked for.
        """


#: Finds the files that a call is about.
FileStores = Callable[[ToolCallContext], FileStore]
