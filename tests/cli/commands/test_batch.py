"""`trioserve batch`: the requests of a file, answered by a server in another thread."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_server import serving_script
from tests.support.scripts import answering
from tests.support.trio_thread import TrioThread
from trioserve.cli.commands import run


def line(n: int, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": f"question {n}"}], **body}
    return {"custom_id": f"line-{n}", "url": "/v1/chat/completions", "body": asked}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines), encoding="utf-8")
    return path


def ids_in(path: Path) -> list[str]:
    return [json.loads(each)["custom_id"] for each in path.read_text("utf-8").splitlines()]


def answered(*argv: str, **config: Any) -> int:
    served = serving_script(answering("Hello"), **config)
    with TrioThread() as thread, thread.open(served) as (url, _):
        return run("batch", [*argv, "--url", url], {})


def test_lines_are_answered_once(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, *map(line, range(5)))
    assert answered(str(source), "-o", str(target)) == 0
    assert ids_in(target) == [f"line-{n}" for n in range(5)]
    assert "5 answers, 0 errors" in capfd.readouterr().out
    write(source, *map(line, range(7)))
    assert answered(str(source), "--output", str(target)) == 0
    assert ids_in(target) == [f"line-{n}" for n in range(7)]
    assert answered(str(source), "-o", str(target)) == 0
    assert "has the answers of all lines" in capfd.readouterr().out


def test_a_line_that_fails_is_in_the_output(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", line(0), line(1, temperature="hot"))
    target = tmp_path / "out.jsonl"
    argv = (str(source), "-o", str(target), "--api-key", "secret")
    assert answered(*argv, api_keys=("secret",)) == 1
    statuses = [
        json.loads(each)["response"]["status_code"]
        for each in target.read_text("utf-8").splitlines()
    ]
    assert statuses == [200, 400]


def test_a_batch_that_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", line(0), line(0))
    assert answered(str(source), "-o", str(tmp_path / "out.jsonl")) == 1
    assert "line 2: 'custom_id' must be" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "No such file"), ("", "is empty"), ("{}", "must have an object"), ("[", "must have")],
)
def test_files_that_are_no_input(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    if content is not None:
        source.write_text(content, encoding="utf-8")
    assert run("batch", [str(source), "-o", str(tmp_path / "out.jsonl")], {}) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("argv", [[], ["in.jsonl"], ["-o", "out.jsonl"]])
def test_both_files_are_named(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("batch", argv, {}) == 2
    assert "name two files" in capsys.readouterr().err


@pytest.mark.system
def test_it_starts_a_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", *(line(n, max_tokens=4) for n in range(3)))
    target = tmp_path / "out.jsonl"
    assert run("batch", [str(source), "-o", str(target), "-t", "1"], {}) == 0, (
        capfd.readouterr().err
    )
    assert ids_in(target) == ["line-0", "line-1", "line-2"]
