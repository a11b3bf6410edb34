"""A file on its way: what is in it is what is in its hash, whatever fails."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests.hub.server import sha256
from trioserve.errors import DiskFullError, HashMismatchError, HubError
from trioserve.models.hub import download as module
from trioserve.models.hub.client import RemoteFile
from trioserve.models.hub.download import PartialFile

CONTENT = b"0123456789" * 100


Opened = Callable[..., PartialFile]


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Opened]:
    """Open the partial file, any number of times."""
    with ExitStack() as closing:

        def open_one(size: int | None = len(CONTENT)) -> PartialFile:
            digest = None if size is None else sha256(CONTENT)
            source = RemoteFile(name="x", url="", size=size, digest=digest)
            partial = PartialFile(tmp_path / "x.incomplete", source)
            closing.callback(partial.close)
            while partial.read_on():
                pass
            return partial

        yield open_one


class FullDisk:
    """A file on a disk that takes some more bytes, and then no more."""

    def __init__(self, file: Any, room: int) -> None:
        self._file = file
        self._room = room

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes) -> int:
        if not self._room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken = min(len(data), self._room)
        self._room -= taken
        written: int = self._file.write(data[:taken])
        return written


def test_a_file_of_several_writes(opened: Opened, tmp_path: Path) -> None:
    partial = opened()
    partial.reserve()
    assert os.path.getsize(partial.path) == 0
    partial.write([CONTENT[:300], CONTENT[300:400]])
    partial.close()
    again = opened()
    assert (again.n_resumed, again.n_bytes) == (400, 400)
    again.write([CONTENT[400:]])
    again.finish(tmp_path / "new" / "x")
    assert (tmp_path / "new" / "x").read_bytes() == CONTENT
    assert not again.path.exists()


def test_a_disk_that_is_full_loses_nothing_of_what_was_there(
    opened: Opened, tmp_path: Path
) -> None:
    partial = opened()
    partial.write([CONTENT[:100]])
    file = partial._file
    partial._file = FullDisk(file, 150)
    with pytest.raises(DiskFullError, match=f"The disk of {tmp_path} is full"):
        partial.write([CONTENT[100:200], CONTENT[200:300]])
    assert partial.n_bytes == os.path.getsize(partial.path) == 200
    partial._file = file
    partial.write([CONTENT[200:]])
    partial.finish(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_a_disk_that_will_be_full_is_noticed_first(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(descriptor: int, size: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    monkeypatch.setattr(module, "_allocate", refuse)
    with pytest.raises(DiskFullError, match="is full"):
        opened().reserve()


def test_two_who_write_the_same_file_do_no_harm(opened: Opened, tmp_path: Path) -> None:
    first = opened()
    first.write([CONTENT[:300]])
    second = opened()
    second.write([CONTENT[300:500]])
    first.write([CONTENT[300:]])
    first.finish(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT
    second.write([CONTENT[500:]])
    with pytest.raises(HubError, match="cannot be written: No such file"):
        second.finish(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT


def test_damage_leaves_nothing(opened: Opened, tmp_path: Path) -> None:
    partial = opened()
    partial.write([CONTENT[:-1], b"x"])
    with pytest.raises(HashMismatchError):
        partial.finish(tmp_path / "x")
    assert (partial.n_bytes, os.path.getsize(partial.path)) == (0, 0)
    assert not (tmp_path / "x").exists()


def test_a_file_whose_size_nobody_knows(opened: Opened, tmp_path: Path) -> None:
    partial = opened(size=None)
    partial.reserve()
    partial.write([CONTENT])
    partial.finish(tmp_path / "x")
    assert (tmp_path / "x").read_bytes() == CONTENT
