"""`Store`: the records as the event loop sees them. One thread at a time reads and writes."""

from __future__ import annotations

import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, Generic, TypeVar

import trio
from outcome import Error, Outcome, Value

from trioserve.concurrency import Bell, Gate, alongside, has_no_thread, run_in_worker
from trioserve.errors import StoreError, TrioServeError, UnavailableError
from trioserve.fair_limiter import current_client
from trioserve.log import get_logger
from trioserve.store.database import DRAFT, Database, error_of, owner_of
from trioserve.store.records import Part, Records, Ref, pieces_of

_T = TypeVar("_T")
_log = get_logger("trioserve.store")

#: Counts bytes of memory for the one who waits, or raises.
Hold = Callable[[int], object]

#: Seconds between two looks for what has expired. There is also one at the start.
_EXPIRY_INTERVAL = 600.0

#: CPU seconds after which a transaction takes no more jobs.
_SLICE = 0.05

#: Bytes that a job counts at least, so that small reads need not ask the event loop one by one.
_LOT = 2**14


class _Job(Generic[_T]):
    """Work of a client for the thread, and its outcome."""

    def __init__(self, client: str, work: Callable[[Records], _T], hold: Hold | None) -> None:
        self.client, self.work, self._hold = client, work, hold
        self._n_held = 0
        self.outcome: Outcome[_T] | None = None
        self.ended = trio.Event()
        self.is_left = False  # by the one who waited for it

    def count(self, n_bytes: int) -> None:
        """Count bytes that are about to be read. In the thread. Raises what `Hold` raises."""
        if self._hold is not None and n_bytes > self._n_held:
            more = max(n_bytes - self._n_held, _LOT)
            trio.from_thread.run_sync(self._hold, more)
            self._n_held += more
        self._n_held -= n_bytes

    def fail(self, error: TrioServeError) -> None:
        """Give it up, unless it is done."""
        if not self.ended.is_set():
            self.outcome = Error(error)
            self.ended.set()


def _in_turns(jobs: Sequence[_Job[Any]]) -> list[_Job[Any]]:
    """Order jobs so that clients take turns; the jobs of each client stay in order."""
    n_of = Counter[str]()

    def turn(job: _Job[Any]) -> int:
        n_of[job.client] += 1
        return n_of[job.client]

    return sorted(jobs, key=turn)


class Store:
    """Runs work on the records of a database, one thread at a time. Made by `open_store`.

    What waits while the thread works is done in one transaction after that, so that many writers
    wait for one write to the disk. Clients take turns in it, and one that has taken long ends: what
    is left is done in the next one.
    """

    def __init__(
        self, database: Database, max_bytes: int, seconds: float, *, shared: bool = False
    ) -> None:
        self._database = database
        self._salt = database.salt
        self._records = Records(database.connection, max_bytes, seconds, shared=shared)
        self._waiting: list[_Job[Any]] = []
        self._gate = Gate()
        self._bell = Bell()
        #: Of the task that has the work done. What was begun is done, whatever is cancelled.
        self._scope = trio.CancelScope(shield=True)
        #: For this work alone: other threads must neither delay it nor wait for it.
        self._limiter = trio.CapacityLimiter(1)
        self._expires_at = 0.0

    def owner_of(self, key: str) -> bytes:
        """The owner of what a client with this API key stores."""
        return owner_of(key, self._salt)

    async def do(self, work: Callable[[Records], _T], hold: Hold | None = None) -> _T:
        """Run work in a transaction, and wait until that is on the disk.

        When cancelled before the thread has taken the work, it is left out; after that, this waits
        for its end. Work may be done again, if that of others has undone all.

        Args:
            work: what to run.
            hold: called, on the event loop, with the bytes of bodies before they are read.

        Raises:
            StoreError: the database cannot be used. Nothing has changed then.
            ServerClosingError: the store closes.
            Exception: from `work` or `hold`. The changes are undone.
        """
        job = _Job(current_client(), work, hold)
        with self._gate.open(job.fail):
            self._waiting.append(job)
            self._bell.ring()
            try:
                await job.ended.wait()
            except trio.Cancelled:
                job.is_left = True
                if job in self._waiting:
                    self._waiting.remove(job)
                    raise
                with trio.CancelScope(shield=True):  # the thread has it
                    await job.ended.wait()
                raise
        assert job.outcome is not None
        return job.outcome.unwrap()

    async def read(self, refs: Sequence[Ref], hold: Hold | None = None) -> list[Part]:
        """Read parts, some in each transaction, so that others have their turns between them.

        Raises:
            NotFoundError: one of them was deleted meanwhile.
            Exception: as `do`.
        """
        parts: list[Part] = []
        for some in pieces_of(refs, lambda ref: ref.size):
            parts += await self.do(partial(Records.read, refs=some), hold)
        return parts

    async def add(
        self,
        id: str,
        kind: str,
        owner: bytes,
        body: Any,
        *,
        parts: tuple[str, Iterable[Part]],
        is_open: bool = False,
        then: Callable[[Records], object] = lambda records: None,
    ) -> None:
        """Add a record with parts on a side, some in each transaction. The last one shows it.

        `then` is called in the last transaction.

        Raises:
            Exception: as `do`. Nothing is left of the record.
        """
        side, pieces = parts[0], pieces_of(parts[1], lambda part: len(part.body))
        first, more = next(pieces, []), next(pieces, None)

        def begin(records: Records) -> None:
            records.add(id, kind, owner, body, is_open=DRAFT)
            records.append(id, side, first)
            if more is None:
                finish(records)

        def finish(records: Records) -> None:
            then(records)
            records.mark(id, is_open)

        try:
            await self.do(begin)
            while more is not None:
                await self.do(partial(Records.append, id=id, side=side, parts=more))
                if (more := next(pieces, None)) is None:
                    await self.do(finish)
        except BaseException:
            with suppress(UnavailableError):
                await self.delete(id)
            raise

    async def delete(self, id: str) -> None:
        """Delete a record, some of its parts in each transaction. After the first, it is not found.

        Is not cancelled. What a failure leaves, the next start deletes.

        Raises:
            Exception: as `do`.
        """
        with trio.CancelScope(shield=True):
            while await self.do(partial(Records.delete_some, id=id)):
                pass

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Do work during a block, and at its end what was begun; nothing after that."""
        async with alongside(self._serve):
            try:
                yield
            finally:
                self._gate.refuse()
                with trio.CancelScope(shield=True):
                    await self._gate.drained()
                self._scope.cancel()

    async def _serve(self) -> None:
        try:
            with self._scope:
                while True:
                    await self._bell.wait()
                    await self._do_waiting()
        finally:
            self._gate.end()

    async def _do_waiting(self) -> None:
        while self._waiting:
            taken, self._waiting = _in_turns(self._waiting), []
            await self._run(taken)
            for job in taken:
                if job.outcome is not None or job.is_left:
                    job.ended.set()
            self._waiting[:0] = [job for job in taken if not job.ended.is_set()]

    async def _run(self, jobs: Sequence[_Job[Any]]) -> None:
        """Do some of the jobs in a transaction."""
        try:
            await trio.to_thread.run_sync(self._work, jobs, limiter=self._limiter)
        except Exception as error:
            failure: TrioServeError = self._failure(error)
            if has_no_thread(error):
                failure = UnavailableError("The system refuses the store a thread.")
            for job in jobs:
                job.outcome = job.outcome or Error(failure.again())

    # -- in the thread

    def _work(self, jobs: Sequence[_Job[Any]]) -> None:
        connection = self._database.connection
        done: list[tuple[_Job[Any], Outcome[Any]]] = []
        try:
            connection.execute("BEGIN IMMEDIATE")
            if time.monotonic() >= self._expires_at:
                self._records.expire()
                self._expires_at = time.monotonic() + _EXPIRY_INTERVAL
            done.extend(self._done(jobs))
            if not connection.in_transaction:  # the last one has undone all: others are done again
                del done[:-1]
            else:
                connection.execute("COMMIT")
        except Exception as error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            failure = self._failure(error)
            failed = [job for job, _ in done] or jobs
            done = [(job, Error(failure.again())) for job in failed]
        for job, outcome in done:
            job.outcome = outcome

    def _done(self, jobs: Sequence[_Job[Any]]) -> Iterator[tuple[_Job[Any], Outcome[Any]]]:
        """Do jobs until there was enough work, or one has ended the transaction."""
        ends_at = time.thread_time() + _SLICE
        for job in jobs:
            if job.is_left:
                continue
            yield job, self._do(job)
            if time.thread_time() > ends_at or not self._database.connection.in_transaction:
                return

    def _do(self, job: _Job[Any]) -> Outcome[Any]:
        """Do a job. If it fails, only its own changes are undone, or all of the transaction."""
        connection = self._database.connection
        self._records.count = job.count
        try:
            connection.execute("SAVEPOINT job")
            result = job.work(self._records)
            connection.execute("RELEASE job")
            return Value(result)
        except Exception as error:
            self._undo_job()
            is_of_store = isinstance(error, (sqlite3.Error, MemoryError))
            return Error(self._failure(error) if is_of_store else error)

    def _undo_job(self) -> None:
        connection = self._database.connection
        try:
            connection.execute("ROLLBACK TO job")
            connection.execute("RELEASE job")
        except (sqlite3.Error, MemoryError):
            if connection.in_transaction:  # otherwise SQLite has undone all
                connection.execute("ROLLBACK")

    def _failure(self, error: Exception) -> StoreError:
        failure = error_of(error, self._database.path)
        _log.error("the store failed", problem=failure.message)
        return failure


@asynccontextmanager
async def open_store(
    path: str | None = None, *, max_bytes: int = 2**28, days: float = 30.0, shared: bool = False
) -> AsyncIterator[Store]:
    """Open a store for a block. At its end, work that was begun is done before it closes.

    Args:
        path: its file; by default it is in memory, and ends with the block.
        max_bytes: bytes of all records.
        days: how long a record is kept after its last use.
        shared: whether each owner has a share for what runs; see `Records.check_share`.

    Raises:
        StoreError: the file cannot be used, or another server has it.
    """
    database = Database() if path is None else await trio.to_thread.run_sync(Database, path)
    try:
        store = Store(database, max_bytes, days * 86400, shared=shared)
        async with store.serving():
            yield store
    finally:
        if path is None:  # there is no disk to wait for
            database.close()
        else:
            with trio.CancelScope(shield=True):
                await run_in_worker(database.close)
