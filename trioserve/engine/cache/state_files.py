"""Files of a prefix cache on disk: each holds one state, and the keys that it was computed for.

::

    magic | is a checkpoint? | width, number of keys | CRC, size of the state | root
    keys | CRC of all before it | state

Several processes may share a folder. A file appears under its name only when it is complete, and is
never changed. Its name is a hash of its root and keys, so processes do not write the same state
twice.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import tempfile
import zlib
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISDIR
from typing import IO

import attrs

from trioserve.types import CellKey

try:
    from fcntl import LOCK_EX, LOCK_NB, flock
except ImportError:  # Windows, where a file that is open cannot be removed
    _HAS_LOCKS = False
else:
    _HAS_LOCKS = True

_HAS_USERS = hasattr(os, "geteuid")
#: Neither wait for the other end of a pipe, nor follow a link.
_NO_WAIT = getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0)

_HEAD = struct.Struct("<8sIIIIQ16s")
_MAGIC = b"trioKV01"
_CRC = struct.Struct("<I")
#: Bytes of a key: a token id, or also media.
_TOKEN, _MEDIA = 4, 32
#: The most keys of a text, so that a damaged header allocates little.
_MAX_KEYS = 2**24
#: Bytes that are written between two looks at `StateFolder.write`'s `is_over`.
_PIECE = 2**23

_NAME = re.compile(r"[0-9a-f]{32}\.kv")
_PART = ".kv.part"
#: The folder of a model.
_FOLDER = re.compile(r"[0-9a-f]{32}")
#: Files that a folder holds at most: the index of each takes some kilobytes of memory.
MAX_FILES = 4096


class DamagedFileError(Exception):
    """A file is not what was written, or was written by another version."""


class WriteEndedError(Exception):
    """A write has no more time."""


@attrs.frozen
class StateHead:
    """All of a file but its state. `root` is a digest, 16 bytes."""

    root: bytes
    keys: Sequence[CellKey] = attrs.field(repr=False)
    is_checkpoint: bool
    size: int = attrs.field(default=0, eq=False)  # of the file
    checksum: int = attrs.field(default=0, eq=False)  # of the state

    @property
    def name(self) -> str:
        kind = b"checkpoint" if self.is_checkpoint else b"sequence"
        digest = hashlib.blake2b(self.root, digest_size=16, person=kind)
        digest.update(pack_keys(self.keys))
        return f"{digest.hexdigest()}.kv"


def pack_keys(keys: Sequence[CellKey]) -> bytes:
    """Write keys as bytes, of the same width."""
    if min(keys, default=0) >= 0:
        return array("i", keys).tobytes()
    return b"".join(key.to_bytes(_MEDIA, "little", signed=True) for key in keys)


def _unpack_keys(data: bytes, width: int) -> list[CellKey]:
    if width == _TOKEN:
        return array("i", data).tolist()
    parts = (data[start : start + width] for start in range(0, len(data), width))
    return [int.from_bytes(part, "little", signed=True) for part in parts]


class StateFolder:
    """The files of one model in a folder that may have those of others, too.

    Any thread may use it.

    Args:
        base: the folder. All files in it count towards `limit`, and the least recently used ones
            go first.
        identity: what the states depend on: 32 hexadecimal digits.
        limit: bytes.
    """

    def __init__(self, base: Path, identity: str, limit: int) -> None:
        self._base, self.path = base, base / identity
        self._limit = limit
        self.size = 0  # of all files in the folder, when it was last counted

    def open(self) -> None:
        """Make the folder, and remove what interrupted writes have left.

        Raises OSError: it cannot be made, or belongs to another user.
        """
        self._base.mkdir(mode=0o700, parents=True, exist_ok=True)
        with suppress(FileExistsError):
            self.path.mkdir(mode=0o700)
        if not _is_own_folder(self.path):
            raise PermissionError(f"{self.path} is not a folder of this user.")
        if _HAS_USERS:
            self.path.chmod(0o700)
        for entry in self._scan(lambda name: name.startswith(".") and name.endswith(_PART)):
            _remove_stale(Path(entry.path))
        self.make_room(0)

    def _scan(self, is_wanted: Callable[[str], object]) -> Iterator[os.DirEntry[str]]:
        """Go through the files of all models, but not those in folders of other users."""
        with os.scandir(self._base) as folders:
            found = [one for one in folders if _FOLDER.fullmatch(one.name)]
        for folder in filter(_is_own_folder, found):
            with suppress(OSError), os.scandir(folder.path) as entries:  # it may be gone
                yield from (one for one in entries if is_wanted(one.name))

    def changed(self) -> int:
        """Return a number that is another one when files have come or gone.

        Raises OSError if the folder is gone.
        """
        return self.path.stat().st_mtime_ns

    def names(self) -> set[str]:
        """List the files. Raises OSError if the folder cannot be read."""
        return {name for name in os.listdir(self.path) if _NAME.fullmatch(name)}

    def head(self, name: str) -> StateHead:
        """Read a file without its state.

        Raises:
            DamagedFileError: it is damaged, or no file of this cache.
            OSError: it cannot be read.
        """
        with _opened(self.path / name) as file:
            return _read_head(file, name)

    def read(self, name: str) -> tuple[StateHead, bytes]:
        """Read a file, which counts as a use. Raises as `head`."""
        with _opened(self.path / name) as file:
            head = _read_head(file, name)
            state = file.read()
        if zlib.crc32(state) != head.checksum:
            raise DamagedFileError(name)
        self.touch(name)
        return head, state

    def touch(self, name: str) -> None:
        """Note that a file is used."""
        with suppress(OSError):  # another process has removed it
            os.utime(self.path / name)

    def remove(self, name: str) -> None:
        with suppress(OSError):
            (self.path / name).unlink()

    def write(self, head: StateHead, state: bytes, is_over: Callable[[], bool]) -> int:
        """Write a file, whole or not at all; returns its size.

        Raises:
            OSError: it cannot be written.
            WriteEndedError: `is_over` returned True, or the state is too large for the folder.
        """
        keys = pack_keys(head.keys)
        width = len(keys) // max(1, len(head.keys))
        before = _HEAD.pack(
            _MAGIC,
            head.is_checkpoint,
            width,
            len(head.keys),
            zlib.crc32(state),
            len(state),
            head.root,
        )
        before += keys
        before += _CRC.pack(zlib.crc32(before))
        size = len(before) + len(state)
        if size > self._limit:
            raise WriteEndedError
        self.make_room(size)
        descriptor, part = tempfile.mkstemp(prefix=".", suffix=_PART, dir=self.path)
        try:
            with open(descriptor, "wb", buffering=0) as file:
                if _HAS_LOCKS:
                    flock(file, LOCK_EX)  # `_remove_stale` leaves it alone
                _write_all(file.fileno(), before, is_over)
                _write_all(file.fileno(), state, is_over)
                if _HAS_LOCKS:
                    os.replace(part, self.path / head.name)
            if not _HAS_LOCKS:
                os.replace(part, self.path / head.name)
        except BaseException:
            with suppress(OSError):
                os.unlink(part)
            raise
        self.size += size
        return size

    def make_room(self, size: int) -> None:
        """Remove the least recently used files until there is room for `size` bytes."""
        found = []
        for entry in self._scan(_NAME.fullmatch):
            with suppress(OSError):  # another process has removed it
                stat = entry.stat(follow_symlinks=False)
                if not S_ISDIR(stat.st_mode):
                    found.append((stat.st_mtime_ns, stat.st_size, entry.path))
        found.sort(reverse=True)
        self.size = sum(length for _, length, _ in found)
        while found and (self.size + size > self._limit or len(found) >= MAX_FILES):
            _, length, path = found.pop()
            with suppress(FileNotFoundError):
                os.unlink(path)
            self.size -= length


def _is_own_folder(path: os.PathLike[str]) -> bool:
    try:
        stat = os.lstat(path)
    except OSError:
        return False
    return S_ISDIR(stat.st_mode) and (not _HAS_USERS or stat.st_uid == os.geteuid())


def _opened(path: Path) -> IO[bytes]:
    """Open a file; something else, such as a pipe, does not block this. Raises OSError."""
    return open(path, "rb", opener=lambda name, flags: os.open(name, flags | _NO_WAIT))


def _write_all(descriptor: int, data: bytes, is_over: Callable[[], bool]) -> None:
    view = memoryview(data)
    while view:
        if is_over():
            raise WriteEndedError
        view = view[os.write(descriptor, view[:_PIECE]) :]


def _read_head(file: IO[bytes], name: str) -> StateHead:
    before = file.read(_HEAD.size)
    if len(before) < _HEAD.size:
        raise DamagedFileError(name)
    magic, is_checkpoint, width, n_keys, checksum, n_bytes, root = _HEAD.unpack(before)
    if magic != _MAGIC or width not in (_TOKEN, _MEDIA) or not 0 < n_keys <= _MAX_KEYS:
        raise DamagedFileError(name)
    keys = file.read(width * n_keys)
    end = file.read(_CRC.size)
    if len(end) < _CRC.size or _CRC.unpack(end)[0] != zlib.crc32(keys, zlib.crc32(before)):
        raise DamagedFileError(name)
    size = len(before) + len(keys) + len(end) + n_bytes
    head = StateHead(root, _unpack_keys(keys, width), bool(is_checkpoint), size, checksum)
    if head.name != name or os.fstat(file.fileno()).st_size != size:
        raise DamagedFileError(name)
    return head


def _remove_stale(path: Path) -> None:
    """Remove what a write has left whose process has died: it holds no lock any more."""
    with suppress(OSError), _opened(path) as file:
        if _HAS_LOCKS:
            flock(file, LOCK_EX | LOCK_NB)
            path.unlink()
            return
    with suppress(OSError):
        if not _HAS_LOCKS:
            path.unlink()
