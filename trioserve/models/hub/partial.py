"""`PartialFile`: a file that is being downloaded, with the hash of what is there. It blocks.

Its name ends in ``.incomplete`` until all of it is there and its hash is right. Its size is what
was received, though room is reserved for the rest, so another process can go on from there.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import os
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from trioserve.errors import DiskFullError, HashMismatchError, HubError

_READ_SIZE = 16 * 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


class PartialFile:
    """A file on its way to its place.

    Args:
        path: where it is until it is whole.
        name: what errors call it.
        size: how large it will be; None: nobody knows.
        digest: its SHA-256, or Git's SHA-1, in hexadecimal; None: nobody knows.

    Raises:
        HubError: it cannot be opened.
    """

    def __init__(self, path: Path, *, name: str, size: int | None, digest: str | None) -> None:
        self.path = path
        self.name = name
        self.size = size
        self.n_bytes = 0  # that are there, and in the hash
        self._digest = digest
        self._hash = self._new_hash()
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not for appending: should a file system have no locks, then two processes write the
            # same bytes at the same places.
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
            self._file = open(os.open(path, flags, 0o666), "r+b", buffering=0)  # noqa: SIM115
        self.n_resumed = os.fstat(self._file.fileno()).st_size
        if size is not None and self.n_resumed > size:
            self.restart()

    def close(self) -> None:
        """Close the file. What is there stays."""
        self._file.close()

    def read_on(self) -> bool:
        """Take some more of what was there before into the hash; False when there is no more."""
        with disk_errors(self.path):
            self._file.seek(self.n_bytes)
            data = self._file.read(_READ_SIZE)
        self._hash.update(data)
        self.n_bytes += len(data)
        return bool(data)

    def reserve(self) -> None:
        """Reserve room for the rest.

        Raises:
            DiskFullError: there is none.
        """
        if self.size is None:
            return
        descriptor = self._file.fileno()
        held = getattr(os.fstat(descriptor), "st_blocks", 0) * 512  # reserved before, for a part
        needed = self.size - max(self.n_bytes, held)
        free = shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise DiskFullError(
                f"{self.name} needs {_gigabytes(needed)} more on the disk of {self.path.parent}, "
                f"which has {_gigabytes(free)} left."
            )
        with disk_errors(self.path):
            _allocate(descriptor, self.size)

    def write(self, chunks: Sequence[bytes]) -> None:
        """Write what was received.

        Raises:
            DiskFullError: there is no room left.
            HashMismatchError: it is more than the file has.
        """
        n_more = sum(map(len, chunks))
        if self.size is not None and self.n_bytes + n_more > self.size:
            self.restart()
            raise HashMismatchError(f"{self.name} is larger than the hub says it is.")
        for chunk in chunks:
            with disk_errors(self.path):
                self._write(chunk)
            self._hash.update(chunk)
            self.n_bytes += len(chunk)

    def restart(self) -> None:
        """Throw away what is there."""
        with disk_errors(self.path):
            self._file.truncate(0)
        self._hash = self._new_hash()
        self.n_bytes = self.n_resumed = 0

    def finish(self, target: Path) -> None:
        """Put the file in its place, if it is what it should be; else nothing of it is kept.

        Raises:
            HashMismatchError: it is something else.
        """
        found = self._hash.hexdigest()
        if self._digest is not None and found != self._digest:
            self.restart()
            raise HashMismatchError(
                f"{self.name} arrived damaged: its hash is {found}, not {self._digest}. It was "
                "thrown away; download it again."
            )
        with disk_errors(self.path):
            os.fsync(self._file.fileno())  # or it might have its name before its contents
            self._file.close()
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.path, target)

    def _write(self, chunk: bytes) -> None:
        """Write all of it, or leave nothing of it behind: the size says what is in the hash."""
        n_written = 0
        self._file.seek(self.n_bytes)
        try:
            while n_written < len(chunk):
                n_written += self._file.write(chunk[n_written:])
        except OSError:
            self._file.truncate(self.n_bytes)
            raise

    def _new_hash(self) -> hashlib._Hash:
        if self._digest is None or len(self._digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % (self.size or 0), usedforsecurity=False)  # as Git does


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn an OSError into one of ours, which names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(f"The disk of {path.parent} is full.") from error
        raise HubError(f"{path} cannot be written: {error.strerror or error}.") from error


def _allocate(descriptor: int, size: int) -> None:
    """Reserve room on the disk without changing the size of the file, where that can be done."""
    if sys.platform != "linux":
        return
    allocate = ctypes.CDLL(None, use_errno=True).fallocate
    allocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    if allocate(descriptor, _KEEP_SIZE, 0, size) and ctypes.get_errno() in _FULL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def _gigabytes(n_bytes: int) -> str:
    return f"{n_bytes / 1e9:.2f} GB"
