"""The file of a store: its schema, and what is done with it beside a server."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from trioserve.errors import StoreError
from trioserve.store import Database, Part, Records, database as database_module
from trioserve.store.database import (
    existing,
    export,
    owner_of,
    problems,
    reading,
    summary,
)
from trioserve.store.usage import UsageQuery, UsageRow, Used, add_usage, expire_usage


def written(path: Path, n: int = 3) -> str:
    """A store with some records, each with a part."""
    database = Database(str(path))
    records = Records(database.connection, 10**9, 1e9)
    for i in range(n):
        records.add(str(i), "note", b"me", {"n": i})
        records.append(str(i), "in", [Part.of(0, "", "x" * 5000)])
    database.close()
    return str(path)


def test_an_older_schema_is_migrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path / "a.db")
    more = "ALTER TABLE records ADD COLUMN more INTEGER DEFAULT 7;"
    migrations = [*database_module._MIGRATIONS, more]
    monkeypatch.setattr(database_module, "_MIGRATIONS", migrations)
    database = Database(path)
    assert database.connection.execute("SELECT more FROM records").fetchall() == [(7,)] * 3
    database.close()
    Database(path).close()  # and not twice
    monkeypatch.undo()
    with pytest.raises(StoreError, match=r"a newer trioserve: its schema has version 2"):
        Database(path)


def test_sizes_follow_changes_of_records_and_parts(tmp_path: Path) -> None:
    database = Database(path := str(tmp_path / "a.db"))
    records = Records(database.connection, 10**9, 1e9)
    for id_ in ("0", "1"):
        records.add(id_, "note", b"me", "x" * 98)
        records.append(id_, "in", [Part(0, "", b"x" * 50)])
    assert summary(path) == [("note", 2, 300)] and problems(path) == []
    records.append("0", "in", [Part(1, "", b"x" * 7)])
    records.change("0", "y")
    records.delete("1")
    assert summary(path) == [("note", 1, 3 + 57)] and problems(path) == []
    records.delete("0")
    assert database.connection.execute("SELECT * FROM sizes").fetchall() == []
    database.close()


def test_a_migration_that_fails_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "a.db")
    broken = "ALTER TABLE records ADD COLUMN more; NONSENSE;"
    migrations = [*database_module._MIGRATIONS, broken]
    monkeypatch.setattr(database_module, "_MIGRATIONS", migrations)
    with pytest.raises(StoreError, match="NONSENSE"):
        Database(path)
    monkeypatch.undo()
    Database(path).close()
    assert problems(path) == []


def test_damage_is_found(tmp_path: Path) -> None:
    path = written(tmp_path / "a.db", n=50)
    with reading(path) as connection:
        (page,) = connection.execute("PRAGMA page_size").fetchone()
    with (tmp_path / "a.db").open("r+b") as file:
        for n in range(10, 60):
            file.seek(n * page + 100)
            file.write(b"\xff" * 200)
    assert problems(path)


def test_wrong_sizes_are_found(tmp_path: Path) -> None:
    path = written(tmp_path / "a.db")
    connection = sqlite3.connect(path)
    connection.execute("UPDATE sizes SET size = 1")
    connection.commit()
    connection.close()
    assert problems(path) == ["the bytes of an owner are not counted correctly"]


def test_only_the_user_of_a_store_can_hold_its_lock(tmp_path: Path) -> None:
    path, lock = written(tmp_path / "a.db"), tmp_path / "a.db.lock"
    assert lock.stat().st_mode & 0o777 == 0o600
    lock.chmod(0o644)  # as it was before
    Database(path).close()
    assert lock.stat().st_mode & 0o777 == 0o600
    lock.unlink()
    lock.symlink_to(tmp_path / "other")
    with pytest.raises(StoreError):
        Database(path)
    assert not (tmp_path / "other").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file another user's")
def test_the_lock_of_another_user_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.db")
    os.chown(f"{path}.lock", 12345, 12345)
    with pytest.raises(StoreError, match="belongs to another user"):
        Database(path)
    os.chown(path, 12345, 12345)  # a store of that user
    Database(path).close()


def test_compacting_gives_space_back(tmp_path: Path) -> None:
    path = written(tmp_path / "a.db", n=100)
    before = (tmp_path / "a.db").stat().st_size
    with existing(path) as database:
        for n in range(99):
            Records(database.connection, 10**9, 1e9).delete(str(n))
        database.compact()
    assert (tmp_path / "a.db").stat().st_size < before / 4
    assert problems(path) == []


def test_a_copy_is_consistent_while_there_are_writes(tmp_path: Path) -> None:
    path, target = str(tmp_path / "a.db"), str(tmp_path / "copy.db")
    database = Database(path)
    records = Records(database.connection, 10**9, 1e9)
    for n in range(500):
        records.add(str(n), "note", b"me", {"text": "x" * 9000})
    shares: list[float] = []

    def write_on(share: float) -> None:  # as a busy server does, which never stops
        shares.append(share)
        assert len(shares) < 50, "the copy begins again and again"
        records.add(f"later {len(shares)}", "note", b"me", {})

    export(path, target, write_on)
    database.close()
    assert shares[-1] == 1
    assert problems(target) == []
    assert len(shares) > 1 and summary(target)[0][1] == 500
    with pytest.raises(StoreError, match="exists"):
        export(path, target, write_on)
    Database(target).close()  # which a server can use


def test_a_copy_that_fails_leaves_nothing(tmp_path: Path) -> None:
    path = written(tmp_path / "a.db")

    def fail(_share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(path, str(tmp_path / "copy.db"), fail)
    with pytest.raises(StoreError):
        export(path, str(tmp_path / "none" / "copy.db"), lambda share: None)
    assert not list(tmp_path.glob("copy*"))


@pytest.mark.parametrize("use", [problems, summary, lambda path: existing(path).__enter__()])
def test_a_store_is_not_made_by_looking(tmp_path: Path, use: Callable[[str], object]) -> None:
    with pytest.raises(StoreError, match="There is no store"):
        use(str(tmp_path / "none.db"))
    assert list(tmp_path.iterdir()) == []


def test_an_owner_depends_on_the_store(tmp_path: Path) -> None:
    one, other = Database(), Database()
    assert owner_of("key", one.salt) == owner_of("key", one.salt) != owner_of("key", other.salt)
    one.close()
    other.close()


def test_usage_is_read_from_the_file(tmp_path: Path) -> None:
    database = Database(path := str(tmp_path / "a.db"))
    row, used = UsageRow("2026-01-31", "alice", "m"), Used(1, 2, 0, 3, 0.5)
    add_usage(database.connection, {row: used})
    add_usage(database.connection, {row: used, UsageRow("2025-12-31", "alice", "m"): used})
    database.close()
    with reading(path) as connection:
        (found,) = UsageQuery(start="2026-01-01", end="2026-12-31").read(connection)
    assert found == attrs.asdict(row) | attrs.asdict(Used(2, 4, 0, 6, 1.0))


def test_old_usage_expires(tmp_path: Path) -> None:
    database = Database()
    for day in ("2024-12-01", "2026-01-30"):
        add_usage(database.connection, {UsageRow(day, "alice", "m"): Used(1)})
    expire_usage(database.connection, 1769900400.0)  # 2026-01-31
    query = UsageQuery(start="2000-01-01", end="2099-01-01")
    assert [one["day"] for one in query.read(database.connection)] == ["2026-01-30"]
    database.close()
