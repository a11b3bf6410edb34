"""Downloads files: resumes an earlier download, and retries when a connection is lost.

The name of a file ends in ``.incomplete`` until all of it is there and its hash is right. Its size
is what was received, though room is reserved for the rest, so another process can resume it.
Locks are those of huggingface_hub: one process has a lock, and one task in it.
"""

from __future__ import annotations

import ctypes
import errno
import hashlib
import math
import os
import shutil
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path

import attrs
import trio
from filelock import FileLock, Timeout

from trioserve.errors import DiskFullError, HashMismatchError, HubError, HubUnavailableError
from trioserve.log import get_logger
from trioserve.models.hub.client import HttpClient, RemoteFile
from trioserve.units import bytes_text

_READ_SIZE = 16 * 2**20
_FULL = (errno.ENOSPC, errno.EDQUOT)
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE


class PartialFile:
    """A file on its way to its place.

    Args:
        path: where it is until it is whole.
        source: what it is to be.

    Raises:
        HubError: it cannot be opened.
    """

    def __init__(self, path: Path, source: RemoteFile) -> None:
        self.path = path
        self.source = source
        self.n_bytes = 0  # received, and in the hash
        self._hash = self._new_hash()
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            # Not for appending: should a file system have no locks, then two processes write the
            # same bytes at the same places.
            flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0)
            self._file = open(os.open(path, flags, 0o666), "r+b", buffering=0)  # noqa: SIM115
        self.n_resumed = os.fstat(self._file.fileno()).st_size
        if source.size is not None and self.n_resumed > source.size:
            self.restart()

    def close(self) -> None:
        """Close the file, and keep it."""
        self._file.close()

    def read_on(self) -> bool:
        """Hash some more of what was received earlier; False at the end."""
        with disk_errors(self.path):
            self._file.seek(self.n_bytes)
            data = self._file.read(_READ_SIZE)
        self._hash.update(data)
        self.n_bytes += len(data)
        return bool(data)

    def reserve(self) -> None:
        """Reserve disk space for the bytes that are missing.

        Raises:
            DiskFullError: the disk lacks it.
        """
        if (size := self.source.size) is None:
            return
        descriptor = self._file.fileno()
        held = getattr(os.fstat(descriptor), "st_blocks", 0) * 512  # reserved before, for a part
        needed = size - max(self.n_bytes, held)
        free = shutil.disk_usage(self.path.parent).free
        if needed > free:
            raise DiskFullError(
                f"{self.source.name} needs {bytes_text(needed)} more on the disk of "
                f"{self.path.parent}, which has {bytes_text(free)} left."
            )
        with disk_errors(self.path):
            _allocate(descriptor, size)

    def write(self, chunks: Sequence[bytes]) -> None:
        """Append received bytes.

        Raises:
            DiskFullError: there is no room left.
            HashMismatchError: it is more than the file has.
        """
        n_more, size = sum(map(len, chunks)), self.source.size
        if size is not None and self.n_bytes + n_more > size:
            self.restart()
            raise HashMismatchError(f"{self.source.name} is larger than the hub says it is.")
        for chunk in chunks:
            with disk_errors(self.path):
                self._write(chunk)
            self._hash.update(chunk)
            self.n_bytes += len(chunk)

    def restart(self) -> None:
        """Discard the received bytes."""
        with disk_errors(self.path):
            self._file.truncate(0)
        self._hash = self._new_hash()
        self.n_bytes = self.n_resumed = 0

    def finish(self, target: Path) -> None:
        """Move the file to its place, if its hash is right; otherwise empty it.

        Raises:
            HashMismatchError: it is something else.
        """
        found, digest = self._hash.hexdigest(), self.source.digest
        if digest is not None and found != digest:
            self.restart()
            raise HashMismatchError(
                f"{self.source.name} arrived damaged: its hash is {found}, not {digest}. It was "
                "thrown away; download it again."
            )
        with disk_errors(self.path):
            os.fsync(self._file.fileno())  # or it might have its name before its contents
            self._file.close()
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(self.path, target)

    def _write(self, chunk: bytes) -> None:
        """Write all of it or nothing, because the size must match the hash so far."""
        n_written = 0
        self._file.seek(self.n_bytes)
        try:
            while n_written < len(chunk):
                n_written += self._file.write(chunk[n_written:])
        except OSError:
            self._file.truncate(self.n_bytes)
            raise

    def _new_hash(self) -> hashlib._Hash:
        size, digest = self.source.size or 0, self.source.digest
        if digest is None or len(digest) == 64:
            return hashlib.sha256()
        return hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)  # as Git does


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise a `HubError` that names `path` in place of an OSError."""
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(f"The disk of {path.parent} is full.") from error
        raise HubError(f"{path} cannot be written: {error.strerror or error}.") from error


def write_text(path: Path, text: str) -> None:
    """Write a small file, which appears at once with all of its text."""
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        new.write_text(text, encoding="utf-8")
        os.replace(new, path)


def _allocate(descriptor: int, size: int) -> None:
    """Reserve room on the disk without changing the size of the file, where that can be done."""
    if sys.platform != "linux":
        return
    allocate = ctypes.CDLL(None, use_errno=True).fallocate
    allocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_longlong, ctypes.c_longlong)
    if allocate(descriptor, _KEEP_SIZE, 0, size) and ctypes.get_errno() in _FULL:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


#: Seconds between two looks at a lock that another task holds.
_POLL = 0.2


@asynccontextmanager
async def locked(path: Path, on_wait: Callable[[], None]) -> AsyncIterator[None]:
    """Hold a lock; `on_wait` is called now and then while another task holds it.

    The system frees it when the process dies. Waiting can be cancelled.

    Raises:
        HubError: the file of the lock cannot be made.
    """
    lock = FileLock(path, mode=0o664, thread_local=False)
    while not await trio.to_thread.run_sync(try_lock, lock):
        on_wait()
        await trio.sleep(_POLL)
    try:
        yield
    finally:
        lock.release()


def try_lock(lock: FileLock) -> bool:
    """Take a lock if it is free; otherwise return False."""
    path = Path(lock.lock_file)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:  # which is an OSError
            return False
    return True


#: Seconds between two reports.
_INTERVAL = 0.1


@attrs.frozen(kw_only=True)
class DownloadProgress:
    """The progress of a download: one of its files, and all of them together, in bytes."""

    url: str
    done: int
    total: int  # 0: not known
    all_done: int
    all_total: int


OnProgress = Callable[[DownloadProgress], None]


class Reporter:
    """Adds up how far the files of a download are, and reports it several times a second."""

    def __init__(self, sizes: Mapping[str, int], on_progress: OnProgress) -> None:
        self._sizes = sizes  # by URL
        self._done = dict.fromkeys(sizes, 0)
        self._on_progress = on_progress
        self._reported = -math.inf

    def __call__(self, url: str, n_bytes: int) -> None:
        """Take note of how many bytes of a file are there."""
        self._done[url] = n_bytes
        now = trio.current_time()
        if n_bytes != self._sizes[url] and now < self._reported + _INTERVAL:
            return
        self._reported = now
        self._on_progress(
            DownloadProgress(
                url=url,
                done=n_bytes,
                total=self._sizes[url],
                all_done=sum(self._done.values()),
                all_total=sum(self._sizes.values()),
            )
        )


_log = get_logger("trioserve.hub")

#: Connections in a row that may bring nothing, and the seconds to wait after the first one.
_MAX_FAILURES = 5
FIRST_WAIT = 1.0
_MAX_WAIT = 60.0

#: Bytes that are asked for at once. Networks that deliver contents have limits for one answer.
_MAX_PIECE = 32 * 2**30

#: Told how many bytes of the file are there.
OnBytes = Callable[[int], None]


async def transfer(
    client: HttpClient, partial: PartialFile, target: Path, on_bytes: OnBytes
) -> None:
    """Receive the rest of a file, check its hash, and put it in its place.

    What was received before a cancel, or before an error, is kept, so that another transfer can go
    on from there. If what was kept earlier turns out to be damaged, all of it is received again.

    Raises:
        HubUnavailableError: the connection was lost several times without bringing anything.
        HashMismatchError: the file's hash is wrong.
        DiskFullError: there is no room left.
        HubError: something else, which it says.
    """
    file, n_resumed = partial.source, partial.n_resumed
    if n_resumed:
        _log.info("resuming", file=file.name, bytes=n_resumed, of=file.size)
    while True:
        try:
            await _receive_all(client, partial, on_bytes)
            return await trio.to_thread.run_sync(partial.finish, target)
        except HashMismatchError:
            if not n_resumed:
                raise
        _log.warning("the partial file was damaged: downloading all of it", file=file.name)
        n_resumed = 0


async def _receive_all(client: HttpClient, partial: PartialFile, on_bytes: OnBytes) -> None:
    """Receive until all of the file is there."""
    file, n_failures = partial.source, 0
    while partial.n_bytes != file.size:
        before = partial.n_bytes
        try:
            await _receive(client, partial, on_bytes)
            if file.size is None:
                return
            continue
        except HubUnavailableError as error:
            n_failures = 0 if partial.n_bytes > before else n_failures + 1
            if n_failures >= _MAX_FAILURES:
                kept = f"{partial.n_bytes} bytes are kept for another try."
                raise HubUnavailableError(f"{error.message} {kept}") from error
            wait = min(error.retry_after or FIRST_WAIT * 2**n_failures, _MAX_WAIT)
            _log.warning(f"{error.message} Trying again.", file=file.name, seconds=wait)
        await trio.sleep(wait)


async def _receive(client: HttpClient, partial: PartialFile, on_bytes: OnBytes) -> None:
    """Receive a piece of the file, or all of it if it is not larger than that.

    Raises:
        HubUnavailableError: that did not come, or not all of it.
    """
    file, start, size = partial.source, partial.n_bytes, partial.source.size
    piece_end = None if size is None else min(start + _MAX_PIECE, size)
    headers = {}
    if start or piece_end != size:
        headers["Range"] = f"bytes={start}-{'' if piece_end is None else piece_end - 1}"
    async with client.get(file.url, headers) as answer:
        found = answer.headers.get("content-range", "")
        is_piece = answer.status == 206 and found.startswith(f"bytes {start}-")
        if start and answer.status in (200, 206, 416) and not is_piece:
            await trio.to_thread.run_sync(partial.restart)
            if answer.status != 200:
                raise HubUnavailableError(f"{file.name} cannot be continued at byte {start}.")
        client.check(answer, file.name)
        end = piece_end if answer.status == 206 else size
        while batch := await answer.batch():
            await trio.to_thread.run_sync(partial.write, batch)
            on_bytes(partial.n_bytes)
    if end is not None and partial.n_bytes < end:
        raise HubUnavailableError(f"{file.name} ended early.")


@attrs.frozen(kw_only=True)
class DownloadTarget:
    """A file that is to be downloaded, and where it goes."""

    file: RemoteFile
    path: Path
    incomplete: Path  # where the partial file is
    lock: Path
    is_there: Callable[[], bool]  # whether all of it is there; blocks
    #: Called when it is there, in a thread.
    on_done: Callable[[], None] = lambda: None
    #: The partial file is known to be a part of this file.
    can_resume: bool = True


async def download(
    client: HttpClient, targets: Iterable[DownloadTarget], on_progress: OnProgress
) -> None:
    """Download the missing ones of some files.

    This waits for files that another task downloads, in this process or in another.

    Raises:
        HubError: a subclass; its message is a sentence that names the problem.
    """
    # All room is reserved before the first byte comes. The order is the same for all, so that no
    # two wait for each other.
    ordered = sorted(targets, key=lambda one: one.lock)
    reporter = Reporter({one.file.url: one.file.size or 0 for one in ordered}, on_progress)
    async with AsyncExitStack() as stack:
        opened = [(one, await _open(stack, one, reporter)) for one in ordered]
        for target, partial_file in opened:
            if partial_file is not None:
                report = partial(reporter, target.file.url)
                await transfer(client, partial_file, target.path, report)
                await trio.to_thread.run_sync(target.on_done)


async def _open(
    stack: AsyncExitStack, target: DownloadTarget, reporter: Reporter
) -> PartialFile | None:
    """Lock a file, open and hash its partial file, and reserve room for the rest.

    None if all of it is there. Leaving the stack closes and unlocks what was opened.
    """
    report, run = partial(reporter, target.file.url), trio.to_thread.run_sync

    def watch() -> None:
        """Report how far the other task is."""
        with suppress(OSError):
            report(target.incomplete.stat().st_size)

    if not await run(target.is_there):
        await stack.enter_async_context(locked(target.lock, watch))
    if await run(target.is_there):  # another task has got it
        report(target.file.size or 0)
        return None
    if not target.can_resume:
        await run(partial(target.incomplete.unlink, missing_ok=True))
    opened = await run(PartialFile, target.incomplete, target.file)
    stack.callback(opened.close)
    while await run(opened.read_on):
        report(opened.n_bytes)
    await run(opened.reserve)
    return opened
