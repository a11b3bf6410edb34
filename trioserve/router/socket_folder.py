"""The folder of the Unix sockets on which the processes of models listen."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

_PREFIX = "trioserve-router-"
_LOCK = "lock"

#: Seconds after which a folder is not in the making any more, but has its lock.
_MAKING = 60.0

#: The longest path of a folder that sockets fit into; the system has a limit of about 100 bytes.
_MAX_LENGTH = 80


@contextmanager
def socket_folder() -> Iterator[Path]:
    """Make a folder that only we may enter, for the length of a block.

    What routers that were killed have left behind is removed, too: no process holds the lock in it.
    """
    path = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(os.fsencode(path)) > _MAX_LENGTH:
        path.rmdir()
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    with FileLock(path / _LOCK):
        try:
            _sweep(path.parent)
            yield path
        finally:
            shutil.rmtree(path)


def _sweep(parent: Path) -> None:
    for folder in parent.glob(f"{_PREFIX}*"):
        lock = folder / _LOCK
        try:
            about = folder.lstat()
            if about.st_uid != os.getuid() or time.time() - about.st_mtime < _MAKING:
                continue
            with FileLock(lock, blocking=False):
                shutil.rmtree(folder)
        except (Timeout, OSError):
            continue  # its router runs, or another one removes it
