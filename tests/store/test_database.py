"""The file of a store: its schema, and what is done with it beside a server."""

from __future__ import annotations

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
    usage,
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
    with pytest.raises(StoreError, match=r"a newer trioserve: its schema has version 4"):
        Database(path)


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


def test_a_sound_store(tmp_path: Path) -> None:
    path = written(tmp_path / "a.db")
    assert problems(path) == []
    ((kind, number, size),) = summary(path)
    assert (kind, number) == ("note", 3) and size > 15_000


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

    def write_on(share: float) -> None:
        shares.append(share)
        if len(shares) < 5:
            records.add(f"later {len(shares)}", "note", b"me", {})

    export(path, target, write_on)
    database.close()
    assert shares[-1] == 1
    assert problems(target) == []
    assert summary(target)[0][1] >= 500
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


def test_a_file_without_usage_is_migrated(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    old = sqlite3.connect(path)
    old.executescript(
        f"{database_module._MIGRATIONS[0]} PRAGMA user_version = 1;"
        f"PRAGMA application_id = {database_module._APPLICATION_ID};"
        "INSERT INTO meta VALUES ('salt', zeroblob(32));"
        "INSERT INTO records VALUES ('1', 'note', x'00', 1.0, 1.0, 0, 2, '{}');"
    )
    old.close()
    assert usage(str(path), UsageQuery(start="2026-01-01", end="2026-12-31")) == []  # as it is
    database = Database(str(path))
    row, used = UsageRow("2026-01-31", "alice", "m"), Used(1, 2, 0, 3, 0.5)
    add_usage(database.connection, {row: used})
    add_usage(database.connection, {row: used, UsageRow("2025-12-31", "alice", "m"): used})
    database.close()
    (found,) = usage(str(path), UsageQuery(start="2026-01-01", end="2026-12-31"))
    assert found == attrs.asdict(row) | attrs.asdict(Used(2, 4, 0, 6, 1.0))
    assert summary(str(path))[0][:2] == ("note", 1)
    assert problems(str(path)) == []


def test_old_usage_expires(tmp_path: Path) -> None:
    database = Database()
    for day in ("2024-12-01", "2026-01-30"):
        add_usage(database.connection, {UsageRow(day, "alice", "m"): Used(1)})
    expire_usage(database.connection, 1769900400.0)  # 2026-01-31
    query = UsageQuery(start="2000-01-01", end="2099-01-01")
    assert [one["day"] for one in query.read(database.connection)] == ["2026-01-30"]
    database.close()
