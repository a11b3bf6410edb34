"""The store of an event loop: transactions, bounds, and what happens when its file fails."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from trioserve.errors import (
    RecordTooLargeError,
    ServerClosingError,
    StoreError,
    StoreFullError,
    StoreInUseError,
)
from trioserve.fair_limiter import set_client
from trioserve.store import (
    Database,
    Part,
    Record,
    Records,
    Store,
    open_store,
    records as records_module,
)
from trioserve.store.database import DRAFT

ME, YOU = b"me", b"you"
_DAY = 86400.0


def add(records: Records, id_: str, owner: bytes = ME, size: int = 0, **options: Any) -> None:
    records.add(id_, "note", owner, {"id": id_, "text": "x" * size}, **options)


def ids(records: Records, owner: bytes = ME, **options: Any) -> list[str]:
    return [each.id for each in records.listed("note", owner, limit=100, **options)]


async def ids_in(store: Store, owner: bytes = ME) -> list[str]:
    return await store.do(lambda records: ids(records, owner))


class Hold:
    """Keeps the thread of a store at work until `let_go`."""

    def __init__(self) -> None:
        self.begun, self._over = trio.Event(), threading.Event()

    def __call__(self, records: Records) -> None:
        trio.from_thread.run_sync(self.begun.set)
        assert self._over.wait(60)

    def let_go(self) -> None:
        self._over.set()


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of records, which a test may change."""
    now = [time.time()]
    monkeypatch.setattr(records_module.time, "time", lambda: now[0])
    return now


@contextmanager
def opened(max_bytes: int = 2**28, seconds: float = 30 * _DAY) -> Iterator[Records]:
    """Records in memory, without the thread of a store."""
    with closing(Database()) as database:
        yield Records(database.connection, max_bytes, seconds)


@asynccontextmanager
async def held(store: Store) -> AsyncIterator[trio.Nursery]:
    """Keep the thread of a store at work during a block, and until all its tasks wait."""
    async with trio.open_nursery() as nursery:
        hold = Hold()
        nursery.start_soon(store.do, hold)
        await hold.begun.wait()
        yield nursery
        await trio.testing.wait_all_tasks_blocked()
        hold.let_go()


async def test_committed_records_survive_a_restart(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    async with open_store(path) as store:
        owner = store.owner_of("key")
        await store.do(lambda records: add(records, "a", owner))
        await store.do(lambda records: records.append("a", "in", [Part.of(0, "p", {"é": 1})]))
    async with open_store(path) as store:
        assert store.owner_of("key") == owner != store.owner_of("other")
        found = await store.do(lambda records: records.find("a", "note", owner))
        assert isinstance(found, Record) and found.body == {"id": "a", "text": ""}
        (part,) = await store.do(lambda records: records.some("a", "in"))
        assert (part.name, part.value) == ("p", {"é": 1})
    assert (tmp_path / "a.db").stat().st_mode & 0o777 == 0o600


async def test_work_that_fails_changes_nothing_and_spares_the_others() -> None:
    def fail(records: Records) -> None:
        add(records, "bad")
        raise ValueError("no")

    async def try_it(store: Store) -> None:
        with pytest.raises(ValueError, match="no"):
            await store.do(fail)

    async with open_store() as store:
        async with held(store) as nursery:
            nursery.start_soon(store.do, lambda records: add(records, "a"))
            nursery.start_soon(try_it, store)
            nursery.start_soon(store.do, lambda records: add(records, "b"))
        assert sorted(await ids_in(store)) == ["a", "b"]


async def test_waiting_jobs_are_done_in_one_transaction(monkeypatch: pytest.MonkeyPatch) -> None:
    async with open_store() as store:
        batches: list[int] = []
        work = store._work

        def noted(jobs: Any) -> None:
            batches.append(len(jobs))
            work(jobs)

        monkeypatch.setattr(store, "_work", noted)
        async with held(store) as nursery:
            for n in range(20):
                nursery.start_soon(store.do, lambda records, n=n: add(records, str(n)))
        assert batches == [1, 20]
        assert len(await ids_in(store)) == 20


async def test_the_event_loop_does_not_wait_for_the_thread() -> None:
    async with open_store() as store, held(store):
        # The store does not use the limiter of other threads.
        assert await trio.to_thread.run_sync(lambda: "free") == "free"


async def test_cancelled_work_that_waits_is_left_out() -> None:
    async with open_store() as store:
        async with held(store) as nursery:
            with trio.CancelScope() as scope:
                scope.cancel()
                await store.do(lambda records: add(records, "cancelled"))
            nursery.start_soon(store.do, lambda records: add(records, "kept"))
        assert await ids_in(store) == ["kept"]


# -- bounds


def test_the_owner_with_most_loses_the_least_recently_used(now: list[float]) -> None:
    with opened(max_bytes=5000) as records:
        add(records, "yours", YOU, 800)
        for n in range(4):
            now[0] += _DAY
            add(records, f"mine {n}", ME, 900)
        now[0] += _DAY
        assert records.find("mine 0", "note", ME)
        add(records, "mine 4", ME, 900)
        assert ids(records) == ["mine 4", "mine 3", "mine 2", "mine 0"]
        assert ids(records, YOU) == ["yours"]


def test_open_work_is_never_evicted() -> None:
    with opened(max_bytes=2000) as records:
        add(records, "open", size=1500, is_open=True)
        with pytest.raises(StoreFullError, match="--store-size is 2000 bytes"):
            add(records, "more", size=1000)
        records.change("open", {"id": "open"})
        add(records, "more", size=1000)
        with pytest.raises(StoreFullError):
            add(records, "huge", size=3000)
        assert ids(records) == ["more", "open"]


def test_parts_count_too_and_do_not_evict_their_own_record() -> None:
    with opened(max_bytes=2000) as records:
        add(records, "a")
        parts = [Part(n, "", b"x" * 900) for n in range(3)]
        with pytest.raises(StoreFullError):
            records.append("a", "in", parts)
        records.append("a", "in", parts[:2])
        records.remove("a", "in", 0)
        records.append("a", "out", parts[2:])
        assert ids(records) == ["a"]


def test_records_expire(now: list[float]) -> None:
    with opened(seconds=2 * _DAY) as records:
        add(records, "old")
        add(records, "open", is_open=True)
        now[0] += 1.5 * _DAY
        add(records, "new")
        now[0] += _DAY
        records.expire()
        assert sorted(ids(records)) == ["new", "open"]


def test_pages_of_a_list(now: list[float]) -> None:
    with opened() as records:
        for name in "abc":
            add(records, name)
            now[0] += 1
        for name in "ed":  # in the same moment
            add(records, name)
        assert ids(records) == ["e", "d", "c", "b", "a"]
        found = records.listed("note", ME, limit=100)
        assert ids(records, after=found[1]) == ["c", "b", "a"]
        assert ids(records, newest=False, after=found[2]) == ["d", "e"]


def test_an_owner_sees_only_own_records() -> None:
    with opened() as records:
        add(records, "a", ME)
        records.append("a", "in", [Part.of(0, "p", 1)])
        assert records.find("a", "note", YOU) is None
        assert records.find("a", "other", ME) is None
        assert records.named("p", YOU, "note") is None
        assert ids(records, YOU) == []
        assert (records.erase(YOU), records.erase(ME)) == (0, 1)
        assert records.some("a", "in") == []


def test_limits_of_a_record() -> None:
    with opened() as records:
        with pytest.raises(RecordTooLargeError, match="its fields"):
            add(records, "a", size=5_000_000)
        add(records, "a")
        with pytest.raises(RecordTooLargeError, match="its items"):
            records.append("a", "in", [Part(n, "", b"x" * 2**20) for n in range(33)])


async def test_a_part_costs_as_much_beside_a_large_body(tmp_path: Path) -> None:
    async with open_store(str(tmp_path / "a.db")) as store:
        before = n_moved()
        # More than SQLite's cache, which would hide it.
        await store.do(lambda records: add(records, "a", size=3_000_000))
        parts = [Part(n, "", b"x") for n in range(50)]
        await store.do(lambda records: records.append("a", "in", parts))
        await store.do(lambda records: [records.remove("a", "in", n) for n in range(50)])
        assert n_moved() - before < 20_000_000


def n_moved() -> int:
    """The bytes that this process has read and written."""
    text = Path("/proc/self/io").read_text(encoding="ascii")
    numbers = dict(line.split(": ") for line in text.splitlines())
    return int(numbers["rchar"]) + int(numbers["wchar"])


async def test_a_record_is_found_when_all_of_it_is_there(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    n_seen: list[int] = []

    async def look(store: Store) -> None:
        n_seen.append(len(await ids_in(store)))

    async with open_store(path) as store:

        async def add_all(id_: str, n: int) -> None:
            await store.add(
                id_, "note", ME, {}, parts=("in", [Part(i, "", b"x" * 2**18) for i in range(n)])
            )

        async with trio.open_nursery() as nursery:
            nursery.start_soon(add_all, "a", 20)
            while not n_seen or not n_seen[-1]:
                await look(store)
        assert n_seen[0] == 0
        refs = await store.do(lambda records: records.refs("a", "in"))
        assert len(await store.read(refs)) == 20
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(add_all, "b", 20)
                await look(store)
                scope.cancel()
        assert await ids_in(store) == ["a"]
        n_seen.clear()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store.delete, "a")
            while await store.do(lambda records: records.places("")):  # others have their turns
                await look(store)
        assert n_seen and n_seen[-1] == 0
        await add_all("a", 1)
        assert await store.do(lambda records: records.erase(ME)) == 1
    database = Database(path)  # as a server leaves it that is killed
    Records(database.connection, 10**6, 1e9).add("c", "note", ME, {}, is_open=DRAFT)
    database.close()
    async with open_store(path) as store:
        assert await store.do(lambda records: records.erase(ME)) == 0


async def test_clients_take_turns() -> None:
    done: list[str] = []

    async def note(store: Store, client: str) -> None:
        set_client(client)
        await store.do(lambda records: done.append(client))

    async with open_store() as store, held(store) as nursery:
        for client in "aaab":
            nursery.start_soon(note, store, client)
            await trio.testing.wait_all_tasks_blocked()
    assert done == ["a", "b", "a", "a"]


async def test_the_store_closes_after_the_last_job(tmp_path: Path) -> None:
    found: list[Any] = []

    async def do(work: Any) -> None:
        found.append(await store.do(work))

    def hold_and_look(records: Records) -> list[str]:
        hold(records)
        return ids(records)

    hold = Hold()
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            async with open_store(str(tmp_path / "a.db")) as store:
                nursery.start_soon(do, hold_and_look)
                await hold.begun.wait()
                nursery.start_soon(do, lambda records: add(records, "waits"))
                await trio.testing.wait_all_tasks_blocked()
                nursery.start_soon(_let_go_later, hold)
                scope.cancel()
    assert found == [[], None]
    with pytest.raises(ServerClosingError):
        await store.do(ids)


async def _let_go_later(hold: Hold) -> None:
    await trio.testing.wait_all_tasks_blocked()
    hold.let_go()


# -- failures


async def test_an_error_is_that_of_its_job_alone() -> None:
    """Without memory, SQLite undoes the whole transaction."""
    results: dict[str, Any] = {}

    def starve(records: Records) -> None:
        records.connection.execute("ROLLBACK")
        raise MemoryError

    async def do(name: str, work: Any) -> None:
        try:
            results[name] = await store.do(work)
        except Exception as error:
            results[name] = error

    async with open_store() as store:
        async with held(store) as nursery:
            for name, work in (("a", add), ("starve", None), ("b", add)):
                job = starve if work is None else partial(work, id_=name)
                nursery.start_soon(do, name, job)
                await trio.testing.wait_all_tasks_blocked()
        assert isinstance(results.pop("starve"), StoreError)
        assert results == {"a": None, "b": None}
        assert sorted(await ids_in(store)) == ["a", "b"]


def filled(size: int = 10**6) -> Any:
    return lambda records: add(records, "big", size=size)


async def test_a_full_disk_fails_writes_alone(tmp_path: Path) -> None:
    async with open_store(str(tmp_path / "a.db")) as store:
        await store.do(lambda records: add(records, "a"))
        connection = store._database.connection
        (n_pages,) = connection.execute("PRAGMA page_count").fetchone()
        connection.execute(f"PRAGMA max_page_count = {n_pages + 2}")
        with pytest.raises(StoreError, match="its disk is full"):
            await store.do(filled())
        assert await ids_in(store) == ["a"]
        connection.execute("PRAGMA max_page_count = 1000000")
        await store.do(filled())
        assert await ids_in(store) == ["big", "a"]


async def test_a_lock_of_another_program_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    async with open_store(str(path)) as store:
        store._database.connection.execute("PRAGMA busy_timeout = 1")
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreError, match="another program has locked it"):
            await store.do(lambda records: add(records, "a"))
        other.execute("ROLLBACK")
        other.close()
        await store.do(lambda records: add(records, "a"))


async def test_two_servers_cannot_share_a_file(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    async with open_store(path):
        with pytest.raises(StoreInUseError, match="in use by another server"):
            async with open_store(path):
                pass
    async with open_store(path):
        pass


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("none/a.db", "No such file or directory"),
        ("folder", "cannot be opened"),
        ("text", "not an SQLite database"),
        ("foreign", "a database of another program"),
    ],
)
async def test_files_that_cannot_be_a_store(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "text").write_text("no database " * 1000, encoding="utf-8")
    with sqlite3.connect(tmp_path / "foreign") as foreign:
        foreign.execute("CREATE TABLE t (a)")
    foreign.close()
    with pytest.raises(StoreError, match=message):
        async with open_store(str(tmp_path / name)):
            pass


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
async def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(StoreError, match="Permission denied"):
        async with open_store(str(tmp_path / "a.db")):
            pass
