"""`trioserve batch`: the requests of a file, answered by a server in another thread."""

from __future__ import annotations

import json
import os
import signal
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.http_server import serving_script
from tests.support.scripts import answering, noting
from tests.support.trio_thread import TrioThread
from tests.support.waiting import patiently, until
from trioserve.cli.commands import batch as batch_command, run
from trioserve.errors import InvalidRequestError


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


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("none/out.jsonl", "No such file or directory"),
        (".", "is not a file"),
        ("pipe", "is not a file"),
        ("notes.txt", "has lines that are no answers"),
        ("-", "name two files"),
    ],
)
def test_outputs_are_checked_before_a_line_is_answered(
    tmp_path: Path,
    output: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    source = write(tmp_path / "in.jsonl", line(0))
    os.mkfifo(tmp_path / "pipe")
    notes = tmp_path / "notes.txt"
    notes.write_text('{"custom_id": "line-9"}\nNot a line', encoding="utf-8")
    assert run("batch", [str(source), "-o", output, "--url", "http://127.0.0.1:9"], {}) == 2
    assert message in capfd.readouterr().err
    assert notes.read_text("utf-8").endswith("\nNot a line")
    assert {each.name for each in tmp_path.iterdir()} == {"in.jsonl", "notes.txt", "pipe"}


def test_an_answer_that_was_cut_off_is_asked_for_again(tmp_path: Path) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, *map(line, range(3)))
    assert answered(str(source), "-o", str(target)) == 0
    target.write_bytes(target.read_bytes()[:-40])
    assert answered(str(source), "-o", str(target)) == 0
    assert ids_in(target) == [f"line-{n}" for n in range(3)]


def test_errors_have_the_numbers_of_the_lines_in_the_input(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, line(0), line(1))
    assert answered(str(source), "-o", str(target)) == 0
    source.write_text(
        source.read_text("utf-8") + "\n" + json.dumps({**line(2), "url": "/v1/completions"})
    )
    assert answered(str(source), "-o", str(target)) == 1
    assert "line 4: 'url' must be" in capfd.readouterr().err


# -- Ctrl-C


@pytest.fixture
def is_watched(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set once SIGINT does not end this process any more."""
    watched, receiver = threading.Event(), trio.open_signal_receiver

    @contextmanager
    def noted(*signals: signal.Signals) -> Iterator[AsyncIterator[int]]:
        with receiver(*signals) as received:
            watched.set()
            yield received

    monkeypatch.setattr(trio, "open_signal_receiver", noted)
    return watched


def test_after_ctrl_c_the_same_command_answers_the_rest(
    tmp_path: Path, is_watched: threading.Event, capfd: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(n) for n in range(40)]
    write(source, *lines)
    is_cancelled, n_asked = threading.Event(), 0

    def script(prompt: str) -> str:
        nonlocal n_asked
        n_asked += 1
        assert is_watched.wait(60)
        if n_asked == 10:
            os.kill(os.getpid(), signal.SIGINT)
        assert n_asked < 10 or is_cancelled.wait(60)
        return "Hello"

    served = serving_script(answering(script, n_slots=1), parallel=1)
    argv = [str(source), "-o", str(target), "--url"]
    with TrioThread() as thread, thread.open(served) as (url, service):
        cancel = service.batches.cancel

        def cancelled(id_: str) -> None:
            cancel(id_)
            is_cancelled.set()

        service.batches.cancel = cancelled  # type: ignore[method-assign]
        assert run("batch", [*argv, url], {}) == 128 + signal.SIGINT
    assert "continues from here" in capfd.readouterr().err
    first = ids_in(target)
    assert 0 < len(first) < 12
    backend, prompts = noting("Hello")
    with TrioThread() as thread, thread.open(serving_script(backend)) as (url, _):
        assert run("batch", [*argv, url], {}) == 0
    assert ids_in(target)[: len(first)] == first
    assert sorted(ids_in(target)) == sorted(each["custom_id"] for each in lines)
    assert len(prompts) == len(lines) - len(first)


class OverAtOnce:
    """Plays the client of a server whose batch is over when it is cancelled."""

    def __init__(self, is_watched: threading.Event) -> None:
        self._is_watched = is_watched
        self._counts = {"total": 1, "completed": 1, "failed": 0}
        self._asked = trio.Event()

    @asynccontextmanager
    async def _answered(self, path: str) -> AsyncIterator[_Body]:
        yield _Body(b'{"id": "file-1"}' if path == "/v1/files" else b'{"custom_id": "line-0"}\n')

    def answer(self, path: str, *_: Any) -> AbstractContextManager[_Body]:
        return self._answered(path)  # type: ignore[return-value]

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, *, form: Any) -> Any:
        counts = batch_command._Counts(**self._counts)
        if path.endswith("/cancel"):
            self._asked.set()
            raise InvalidRequestError("The batch is completed, and cannot be cancelled.")
        if body is not None:
            return form(id="batch_1", status="in_progress", request_counts=counts)
        await until(self._is_watched.is_set)
        os.kill(os.getpid(), signal.SIGINT)
        await self._asked.wait()
        return form("batch_1", "completed", counts, output_file_id="file-2")


class _Body:
    def __init__(self, data: bytes) -> None:
        self._data = [data]

    async def receive(self) -> bytes:
        await trio.lowlevel.checkpoint()
        return self._data.pop() if self._data else b""


async def test_ctrl_c_after_the_end_loses_no_answer(
    tmp_path: Path, is_watched: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_command, "_INTERVAL", 0)
    target = tmp_path / "out.jsonl"
    client: Any = OverAtOnce(is_watched)
    with patiently():
        code = await batch_command._run(client, b"", "/v1/chat/completions", target)
    assert code == 128 + signal.SIGINT
    assert ids_in(target) == ["line-0"]


@pytest.mark.system
def test_it_starts_a_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", *(line(n, max_tokens=4) for n in range(3)))
    target = tmp_path / "out.jsonl"
    assert run("batch", [str(source), "-o", str(target), "-t", "1"], {}) == 0, (
        capfd.readouterr().err
    )
    assert ids_in(target) == ["line-0", "line-1", "line-2"]
