"""`trioserve usage`: what keys have used, from a file or a server."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.cli.commands.test_ps import answering
from trioserve.cli.main import run
from trioserve.store import Database
from trioserve.store.usage import UsageRow, Used, add_usage, day_before, day_of

TODAY = day_of(time.time())
ROW = {"day": None, "key": "alice", "model": None, "requests": 1, "input_tokens": 2,
       "cached_input_tokens": 0, "output_tokens": 3, "seconds": 0.5}  # fmt: skip


@pytest.fixture
def store(tmp_path: Path) -> str:
    path = str(tmp_path / "a.db")
    database = Database(path)
    for day, key in ((TODAY, "alice"), (TODAY, ""), (day_before(TODAY, 40), "alice")):
        add_usage(database.connection, {UsageRow(day, key, "m"): Used(1, 2, 0, 3, 0.5)})
    database.close()
    return path


def test_a_table_of_a_file(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("usage", ["--store", store, "--by", "key,model"], {}) == 0
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["KEY", "MODEL", "REQUESTS", "INPUT", "CACHED", "OUTPUT", "SECONDS"],
        ["-", "m", "1", "2", "0", "3", "0.5"],
        ["alice", "m", "1", "2", "0", "3", "0.5"],
    ]
    assert run("usage", ["--store", store, "--since", "60", "--by=key", "--json"], {}) == 0
    assert [one["requests"] for one in json.loads(capsys.readouterr().out)] == [1, 2]


def test_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with answering({"data": [ROW], "has_more": False}) as (url, requests):
        environ = {"LLAMA_API_KEY": "secret"}
        assert run("usage", ["--url", url, "--since", "1", "--by", "key"], environ) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["alice", "1", "2", "0", "3", "0.5"]
    assert requests == [
        (f"/v1/usage?start={TODAY}&end={TODAY}&group_by=key&limit=1000", "Bearer secret")
    ]  # fmt: skip


@pytest.mark.parametrize("argv", [["--since", "0"], ["--since", "x"], ["--by", "owner"],
                                  ["--store", "a.db", "--url", "b"]])  # fmt: skip
def test_wrong_arguments(argv: list[str]) -> None:
    assert run("usage", argv, {}) == 2


def test_a_key_is_erased_by_its_name(store: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("store", ["erase", store, "--name", "alice"], {}) == 0
    assert capsys.readouterr().out == "deleted 0 records, and 2 rows of usage\n"
    assert run("usage", ["--store", store, "--since", "60", "--by", "key", "--json"], {}) == 0
    assert [one["key"] for one in json.loads(capsys.readouterr().out)] == [""]
