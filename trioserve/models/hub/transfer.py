"""Transfers one file: goes on where an earlier transfer ended, and through lost connections."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

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
    while partial.n_bytes != partial.size or partial.size is None:
        before = partial.n_bytes
        try:
            await _receive(client, file, partial, on_bytes)
            return
        except HubUnavailableError as error:
            n_failures = 1 if partial.n_bytes > before else n_failures + 1
            if n_failures >= _MAX_FAILURES:
                kept = f"{partial.n_bytes} of {partial.size} bytes are kept for another try."
                raise HubUnavailableError(f"{error.message} {kept}") from error
            wait = min(error.retry_after or FIRST_WAIT * 2 ** (n_failures - 1), _MAX_WAIT)
            _log.warning(f"{error.message} Trying again.", file=file.name, seconds=wait)
        await trio.sleep(wait)


async def _receive(
    client: HttpClient, file: RemoteFile, partial: PartialFile, on_bytes: OnBytes
) -> None:
    """Receive as much as one connection brings.

    Raises:
        HubUnavailableError: that was not all.
    """
    start = partial.n_bytes
    async with client.get(file.url, {"Range": f"bytes={start}-"} if start else None) as answer:
        if start and not _begins_at(answer, start):
            await trio.to_thread.run_sync(partial.restart)
            if answer.status in (206, 416):
                raise HubUnavailableError(f"{file.name} cannot be continued at byte {start}.")
        client.check(answer, file.name)
        while batch := await answer.batch():
            await trio.to_thread.run_sync(partial.write, batch)
            on_bytes(partial.n_bytes)
    if partial.size is not None and partial.n_bytes < partial.size:
        raise HubUnavailableError(f"{file.name} ended early.")


def _begins_at(answer: Answer, start: int) -> bool:
    """Whether an answer is the rest of the file from there, and not all of it."""
    return answer.status == 206 and answer.headers.get("content-range", "").startswith(
        f"bytes {start}-"
    )
