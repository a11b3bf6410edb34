"""`Store`: the records as the event loop sees them. One thread at a time reads and writes."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any, Generic, TypeVar

import trio
from outcome import Error, Outcome, Value

from trioserve.concurrency import has_no_thread, surely
from trioserve.errors import StoreError, UnavailableError
from trioserve.log import get_logger
from trioserve.store.database import Database, error_of, owner_of
from trioserve.store.records import Records

_T = TypeVar("_T")
_log = get_logger("trioserve.store")

#: Seconds between two looks for what has expired. There is also one at the start.
_EXPIRY_INTERVAL = 600.0


class _Job(Generic[_T]):
    """Work for the thread, and what became of it."""

    def __init__(self, work: Callable[[Records], _T]) -> None:
        self.work = work
        self.outcome: Outcome[_T] | None = None


class Store:
    """Runs work on the records of a database, one thread at a time. Made by `open_store`.

    What waits while the thread works is done in one transaction after that, so that many writers
    wait for one write to the disk.
    """

    def __init__(self, database: Database, max_bytes: int, seconds: float) -> None:
        self._database = database
        self._salt = database.salt
        self._records = Records(database.connection, max_bytes, seconds)
        self._waiting: list[_Job[Any]] = []
        self._turn = trio.Lock()
        #: For this work alone: other threads must neither delay it nor wait for it.
        self._limiter = trio.CapacityLimiter(1)
        self._expires_at = 0.0

    def owner_of(self, key: str) -> bytes:
        """The owner of what a client with this API key stores."""
        return owner_of(key, self._salt)

    async def do(self, work: Callable[[Records], _T]) -> _T:
        """Run work in a transaction, and wait until that is on the disk.

        When cancelled while it waits for the thread, the work is left out, unless the thread has
        taken it.

        Raises:
            StoreError: the database cannot be used. Nothing has changed then.
            Exception: from `work`, whose changes are undone.
        """
        job = _Job(work)
        self._waiting.append(job)
        try:
            async with self._turn:
                if job.outcome is None:
                    await self._run(job)
        finally:
            if job in self._waiting:
                self._waiting.remove(job)
        assert job.outcome is not None
        return job.outcome.unwrap()

    async def _run(self, job: _Job[_T]) -> None:
        """Run what waits, this job in it. If there is no thread for it, the others try again."""
        jobs, self._waiting = self._waiting, []
        try:
            await trio.to_thread.run_sync(self._work, jobs, limiter=self._limiter)
        except RuntimeError as error:
            if not has_no_thread(error):
                raise
            raise UnavailableError("The system refuses the store a thread.") from None
        finally:
            self._waiting[:0] = [each for each in jobs if each.outcome is None and each is not job]

    # -- in the thread

    def _work(self, jobs: Sequence[_Job[Any]]) -> None:
        connection = self._database.connection
        try:
            connection.execute("BEGIN IMMEDIATE")
            if time.monotonic() >= self._expires_at:
                self._records.expire()
                self._expires_at = time.monotonic() + _EXPIRY_INTERVAL
            outcomes = [self._do(job) for job in jobs]
            connection.execute("COMMIT")
        except sqlite3.Error as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            failure = self._failure(error)
            outcomes = [Error(failure.again()) for _ in jobs]
        for job, outcome in zip(jobs, outcomes, strict=True):
            job.outcome = outcome

    def _do(self, job: _Job[Any]) -> Outcome[Any]:
        connection = self._database.connection
        connection.execute("SAVEPOINT job")
        try:
            result: Outcome[Any] = Value(job.work(self._records))
        except Exception as error:
            if not connection.in_transaction:  # SQLite has undone all of it
                raise
            connection.execute("ROLLBACK TO job")
            result = Error(self._failure(error) if isinstance(error, sqlite3.Error) else error)
        connection.execute("RELEASE job")
        return result

    def _failure(self, error: sqlite3.Error) -> StoreError:
        failure = error_of(error, self._database.path)
        _log.error("the store failed", problem=failure.message)
        return failure


@asynccontextmanager
async def open_store(
    path: str | None = None, *, max_bytes: int = 2**28, days: float = 30.0
) -> AsyncIterator[Store]:
    """Open a store for a block.

    Args:
        path: its file; by default it is in memory, and ends with the block.
        max_bytes: bytes of all records.
        days: how long a record is kept after its last use.

    Raises:
        StoreError: the file cannot be used, or another server has it.
    """
    if path is None:  # there is no disk to wait for
        with closing(Database()) as database:
            yield Store(database, max_bytes, days * 86400)
        return
    database = await trio.to_thread.run_sync(Database, path)
    try:
        yield Store(database, max_bytes, days * 86400)
    finally:
        with trio.CancelScope(shield=True):
            await surely(database.close)
