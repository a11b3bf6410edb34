"""`trioserve store`: checks, compacts, copies and erases."""

from __future__ import annotations

from pathlib import Path

import pytest

from trioserve.cli.main import run
from trioserve.store import Database, Records
from trioserve.store.database import owner_of, summary


@pytest.fixture
def store(tmp_path: Path) -> str:
    path = str(tmp_path / "a.db")
    database = Database(path)
    records = Records(database.connection, 10**9, 1e9)
    for i, key in enumerate(("one", "one", "two", "")):
        owner = owner_of(key, database.salt)
        records.add(f"resp_{i}", "response", owner, {"text": f"[{key}]"})
    database.close()
    return path


def test_check_lists_what_is_there(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("store", ["check", store], {}) == 0
    heading, row = capsys.readouterr().out.splitlines()
    assert heading.split() == ["KIND", "NUMBER", "SIZE"]
    assert row.split()[:2] == ["response", "4"]


def test_check_finds_damage(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytearray(Path(store).read_bytes())
    data[5000 : len(data)] = b"\xff" * (len(data) - 5000)
    Path(store).write_bytes(data)
    assert run("store", ["check", store], {}) == 1
    assert store in capsys.readouterr().err


@pytest.mark.parametrize(("key", "n"), [("one", 2), ("two", 1), ("", 1), ("three", 0)])
def test_erase_deletes_what_one_key_has(
    store: str, key: str, n: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("store", ["erase", store, "--api-key", key], {}) == 0
    assert capsys.readouterr().out == f"deleted {n} records\n"
    assert summary(store)[0][1] == 4 - n
    data = Path(store).read_bytes()
    left = {name for name in ("one", "two", "") if f"[{name}]".encode() in data}
    assert left == {"one", "two", ""} - {key}


def test_the_key_may_be_in_the_environment(store: str) -> None:
    assert run("store", ["erase", store], {"LLAMA_API_KEY": "one"}) == 0
    assert summary(store)[0][1] == 2


def test_compact_and_export(store: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(tmp_path / "copy.db")
    assert run("store", ["export", store, target], {}) == 0
    assert summary(target) == summary(store)
    assert run("store", ["export", store, target], {}) == 1
    assert "exists" in capsys.readouterr().err
    assert run("store", ["compact", store], {}) == 0
    assert "before" in capsys.readouterr().out


def test_a_store_in_use_is_not_compacted(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    database = Database(store)
    try:
        for action in ("compact", "erase"):
            assert run("store", [action, store], {}) == 1
            assert "in use by another server" in capsys.readouterr().err
        assert run("store", ["check", store], {}) == 0
    finally:
        database.close()


@pytest.mark.parametrize("argv", [[], ["look", "a.db"], ["check"], ["export", "a.db"]])
def test_wrong_arguments(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("store", argv, {}) == 2
    assert "store" in capsys.readouterr().err
