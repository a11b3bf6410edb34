"""Transfers one file: goes on where an earlier transfer ended, and through lost connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Self

import attrs
import structlog
import trio

from trioserve.errors import HashMismatchError, HubUnavailableError
from trioserve.models.hub.api import RemoteFile
from trioserve.models.hub.http import Answer, HttpClient
from trioserve.models.hub.partial import PartialFile

_log = structlog.stdlib.get_logger("trioserve.hub")

#: How often in a row a connection may bring nothing, and the seconds to wait after the first time.
_MAX_FAILURES = 5
FIRST_WAIT = 1.0
_MAX_WAIT = 60.0

#: Bytes that are asked for at once. Networks that deliver contents have limits for one answer.
_MAX_PIECE = 32 * 2**30

#: Told how many bytes of the file are there.
OnBytes = Callable[[int], None]


@asynccontextmanager
async def open_partial(
    path: Path, file: RemoteFile, on_bytes: OnBytes
) -> AsyncIterator[PartialFile]:
    """Open what there is of a file, hash it, and reserve room for the rest.

    Raises:
        DiskFullError: there is no room for it.
        HubError: the file cannot be written.
    """
    run = trio.to_thread.run_sync
    partial = await run(
        lambda: PartialFile(path, name=file.name, size=file.size, digest=file.digest)
    )
    try:
        while await run(partial.read_on):
            on_bytes(partial.n_bytes)
        await run(partial.reserve)
        yield partial
    finally:
        partial.close()


async def transfer(
    client: HttpClient, file: RemoteFile, partial: PartialFile, target: Path, on_bytes: OnBytes
) -> None:
    """Receive the rest of a file, check its hash, and put it in its place.

    What was received before a cancel, or before an error, is kept, so that another transfer can go
    on from there. If what was kept earlier turns out to be damaged, all of it is received again.

    Raises:
        HubUnavailableError: the connection was lost several times without bringing anything.
        HashMismatchError: the file is not what it should be.
        DiskFullError: there is no room left.
        HubError: something else, which it says.
    """
    n_resumed = partial.n_resumed
    if n_resumed:
        _log.info("resuming", file=file.name, bytes=n_resumed, of=file.size)
    try:
        await _receive_all(client, file, partial, on_bytes)
        await trio.to_thread.run_sync(partial.finish, target)
    except HashMismatchError:
        if not n_resumed:
            raise
        _log.warning("what was there was damaged: downloading all of it", file=file.name)
        await _receive_all(client, file, partial, on_bytes)
        await trio.to_thread.run_sync(partial.finish, target)


async def _receive_all(
    client: HttpClient, file: RemoteFile, partial: PartialFile, on_bytes: OnBytes
) -> None:
    """Receive until all of the file is there."""
    n_failures = 0
    while partial.n_bytes != partial.size:
        before = partial.n_bytes
        try:
            await _receive(client, file, partial, on_bytes)
            if partial.size is None:
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


async def _receive(
    client: HttpClient, file: RemoteFile, partial: PartialFile, on_bytes: OnBytes
) -> None:
    """Receive a piece of the file, or all of it if it is not larger than that.

    Raises:
        HubUnavailableError: that did not come, or not all of it.
    """
    start = partial.n_bytes
    piece = _Piece.of(start, partial.size)
    async with client.get(file.url, piece.headers) as answer:
        if start and answer.status in (200, 206, 416) and not piece.is_in(answer):
            await trio.to_thread.run_sync(partial.restart)
            if answer.status != 200:
                raise HubUnavailableError(f"{file.name} cannot be continued at byte {start}.")
        client.check(answer, file.name)
        end = piece.end if answer.status == 206 else partial.size
        while batch := await answer.batch():
            await trio.to_thread.run_sync(partial.write, batch)
            on_bytes(partial.n_bytes)
    if end is not None and partial.n_bytes < end:
        raise HubUnavailableError(f"{file.name} ended early.")


@attrs.frozen
class _Piece:
    """A part of a file that is asked for at once: from `start` to before `end`."""

    start: int
    end: int | None
    is_all: bool

    @classmethod
    def of(cls, start: int, size: int | None) -> Self:
        """The next piece of a file of that size; None: to the end, wherever that is."""
        end = None if size is None else min(start + _MAX_PIECE, size)
        return cls(start, end, is_all=start == 0 and end == size)

    @property
    def headers(self) -> dict[str, str]:
        if self.is_all:
            return {}
        last = "" if self.end is None else self.end - 1
        return {"Range": f"bytes={self.start}-{last}"}

    def is_in(self, answer: Answer) -> bool:
        """Whether an answer is this piece, and not another one, or all of the file."""
        found = answer.headers.get("content-range", "")
        return answer.status == 206 and found.startswith(f"bytes {self.start}-")
