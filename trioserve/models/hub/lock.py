"""A lock that only one process, and only one task in it, holds: where huggingface_hub has it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import trio
from filelock import FileLock, Timeout

from trioserve.models.hub.partial import disk_errors

#: Seconds between two looks at a lock that somebody else holds.
_POLL = 0.2


@asynccontextmanager
async def locked(path: Path, on_wait: Callable[[], None]) -> AsyncIterator[None]:
    """Hold a lock; `on_wait` is called now and then while somebody else holds it.

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
    """Take a lock if nobody has it; otherwise return False."""
    path = Path(lock.lock_file)
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(blocking=False)
        except Timeout:  # which is an OSError
            return False
    return True
