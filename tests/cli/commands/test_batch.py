"""`trioserve batch`: the requests of a file, answered by a server in another thread."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.canned_server import http_answer, json_answer, serving_bytes
from tests.support.http_server import serving_script
from tests.support.scripts import answering, noting
from tests.support.trio_thread import TrioThread
from tests.support.waiting import PATIENCE, until
from trioserve.api.stored import batches
from trioserve.cli.commands import batch
from trioserve.cli.main import run


def line(n: int, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": f"question {n}"}], **body}
    return {"custom_id": f"line-{n}", "url": "/v1/chat/completions", "body": asked}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{json.dumps(each)}\n" for each in lines), encoding="utf-8")
    return path


def answers_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(each) for each in path.read_text("utf-8").splitlines()]


def ids_in(path: Path) -> list[str]:
    """The ids of the lines with an answer, in order: answers come as the model is ready."""
    return sorted(each["custom_id"] for each in answers_in(path))


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
    assert capfd.readouterr().out.endswith("7 answers, 0 errors\n")


def test_a_line_that_fails_is_in_the_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = write(tmp_path / "in.jsonl", line(0), line(1, temperature="hot"))
    target = tmp_path / "out.jsonl"
    argv = (str(source), "-o", str(target), "--api-key", "secret")
    assert answered(*argv, api_keys=("secret",)) == 1
    answers = {each["custom_id"]: each["response"] for each in answers_in(target)}
    statuses = {id_: each["status_code"] for id_, each in answers.items()}
    assert statuses == {"line-0": 200, "line-1": 400}
    assert answers["line-0"]["request_id"]
    assert capfd.readouterr().out.endswith("1 answers, 1 errors; failed: line 2\n")
    assert run("batch", [*argv, "--url", "http://127.0.0.1:9"], {}) == 1
    assert capfd.readouterr().out.endswith("1 answers, 1 errors; failed: line 2\n")


def test_a_wrong_url_refuses_its_line_only(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    completion = {"custom_id": "c", "url": "/v1/completions", "body": {"prompt": "Hi"}}
    write(source, line(0), {**line(1), "url": "/v1/models/unload"}, "", completion)
    source.write_text(source.read_text("utf-8").replace('""', ""), "utf-8")
    assert answered(str(source), "-o", str(target)) == 1
    assert capfd.readouterr().out.endswith("2 answers, 1 errors; failed: line 2\n")
    (refused,) = (each for each in answers_in(target) if each["custom_id"] == "line-1")
    assert refused["response"] is None
    assert refused["error"]["code"] == "invalid_url"
    assert tuple(batch._PROMPTS) == batches._ENDPOINTS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("", "is empty"),
        ("{}", "line 1: Object missing required field `custom_id`"),
        ("\n\n[", "line 3: Expected `object`, got `array`"),
        (f"{json.dumps(line(0))}\n{json.dumps({**line(1), 'body': []})}", "line 2: Expected"),
        (f"{json.dumps(line(0))}\n\n{json.dumps(line(0))}", "line 3: its custom_id is that of li"),
        ('{"custom_id": "a", "url": "", "body": {"x": ' + "[" * 100_000, "line 1: maximum recurs"),
    ],
)
def test_files_that_are_no_input(
    tmp_path: Path, content: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "in.jsonl"
    if content is not None:
        source.write_text(content, encoding="utf-8")
    assert run("batch", [str(source), "-o", str(tmp_path / "out.jsonl")], {}) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [([], "needs INPUT"), (["in.jsonl"], "name two files"), (["-o", "out.jsonl"], "needs INPUT")],
)
def test_both_files_are_named(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("batch", argv, {}) == 2
    assert message in capsys.readouterr().err


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


@pytest.mark.parametrize("n_left", [1, 5, 40, 10**6])
def test_an_answer_that_was_cut_off_is_asked_for_again(tmp_path: Path, n_left: int) -> None:
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, *map(line, range(3)))
    assert answered(str(source), "-o", str(target)) == 0
    *lines, last = target.read_bytes().splitlines()
    target.write_bytes(b"\n".join([*lines, last[:n_left]]))
    assert answered(str(source), "-o", str(target)) == 0
    assert ids_in(target) == [f"line-{n}" for n in range(3)]
    assert (last in target.read_bytes()) == (n_left > len(last))


def test_one_command_at_a_time_writes_an_output(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source, target = write(tmp_path / "in.jsonl", line(0)), tmp_path / "out.jsonl"
    with target.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert run("batch", [str(source), "-o", str(target)], {}) == 2
    assert "is the output of another command" in capfd.readouterr().err


# -- a server that is busy, or fails


BUSY = [json_answer({"error": {"message": "Busy."}}, f"{n} Busy") for n in (429, 503)]
FAILURE = json_answer({"error": {"message": "The engine failed."}}, "500 Internal Server Error")


def with_answers(tmp_path: Path, *answers: bytes) -> int:
    source = write(tmp_path / "in.jsonl", line(0))
    props = json_answer({"default_generation_settings": {"n_ctx": 0}})
    with serving_bytes(props, *answers) as address:
        url = f"http://{address.host}:{address.port}"
        return run("batch", [str(source), "-o", str(tmp_path / "out.jsonl"), "--url", url], {})


def test_only_an_answer_to_the_line_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(batch, "_MAX_PAUSE", 0)
    target = tmp_path / "out.jsonl"
    assert with_answers(tmp_path, *[FAILURE] * 5) == 1
    assert target.read_bytes() == b""
    assert capfd.readouterr().out == f"{target}: 0 answers, 1 errors; failed: line 1\n"
    assert with_answers(tmp_path, *BUSY * 5, *[FAILURE] * 4, json_answer({"id": "x"})) == 0
    assert answers_in(target)[0]["response"]["body"] == {"id": "x"}


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (
            json_answer({"error": {"message": "Invalid\x1b[2J key"}}, "401 No"),
            "says: Invalid [2J k",
        ),
        (json_answer({}, "302 Found"), "answers with status 302"),
        (http_answer(b'{"a": ' + b"[" * 100_000), "does not answer as expected"),
        (json_answer({"id": "x"})[:-3], "is lost"),
    ],
    ids=["key", "redirect", "nested", "half"],
)
def test_a_server_that_cannot_be_used_ends_the_command(
    tmp_path: Path, answer: bytes, told: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert with_answers(tmp_path, answer) == 1
    out, err = capfd.readouterr()
    assert (tmp_path / "out.jsonl").read_bytes() == b""
    assert not out
    assert told in err
    assert err[:-1].isprintable()


# -- signals


@pytest.mark.system
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"])
def test_after_a_signal_the_same_command_answers_the_rest(tmp_path: Path, name: str) -> None:
    number = signal.Signals[name]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    lines = [line(n) for n in range(30)]
    write(source, *lines)
    may_end, n_asked = threading.Event(), 0

    def script(prompt: str) -> str:
        nonlocal n_asked
        n_asked += 1
        if n_asked == 10:
            may_end.wait(PATIENCE)
        return "Hello"

    served = serving_script(answering(script, n_slots=1), parallel=1)
    argv = [str(source), "-o", str(target), "--url"]
    with TrioThread() as thread, thread.open(served) as (url, _):
        words = [sys.executable, "-m", "trioserve", "batch", *argv, url]
        with subprocess.Popen(words, stderr=subprocess.PIPE) as command:
            assert command.stderr is not None
            trio.run(
                until, lambda: command.poll() or (target.exists() and len(ids_in(target)) == 9)
            )
            assert command.poll() is None, command.stderr.read()
            command.send_signal(number)
            _, err = command.communicate(timeout=PATIENCE)
        may_end.set()
    if number != signal.SIGKILL:
        assert command.returncode == 128 + number
        assert b"continues from here" in err
    first = target.read_bytes()
    backend, prompts = noting("Hello")
    with TrioThread() as thread, thread.open(serving_script(backend)) as (url, _):
        assert run("batch", [*argv, url], {}) == 0
    assert target.read_bytes().startswith(first)
    assert ids_in(target) == sorted(each["custom_id"] for each in lines)
    assert len(prompts) == len(lines) - 9


@pytest.mark.system
def test_it_starts_a_server(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    source = write(tmp_path / "in.jsonl", *(line(n, max_tokens=4) for n in range(3)))
    target = tmp_path / "out.jsonl"
    assert run("batch", [str(source), "-o", str(target), "-t", "1"], {}) == 0, (
        capfd.readouterr().err
    )
    assert ids_in(target) == ["line-0", "line-1", "line-2"]
