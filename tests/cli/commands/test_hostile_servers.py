"""Commands against a server that is damaged, or wants to do harm: one line, and exit code 1."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.support.canned_server import ENDLESS, http_answer, json_answer, serving_paths
from trioserve.cli.main import main

MODELS = json_answer({"data": [{"id": "one"}]})
PROPS = json_answer({"default_generation_settings": {"n_ctx": 4096}})

ANSWERS: dict[str, bytes | Iterable[bytes]] = {
    "HTML": http_answer(b"<html>\x1b[2JLogin</html>", "200 OK", "Content-Type: text/html"),
    "nothing": http_answer(b""),
    "null": json_answer(None),
    "list": json_answer([1]),
    "nulls": json_answer({"data": None, "default_generation_settings": None, "choices": None}),
    "list of nulls": json_answer({"data": [None]}),
    "list of lists": json_answer({"data": [[]]}),
    "number as name": json_answer({"data": [{"id": 5}]}),
    "NUL in a name": json_answer({"data": [{"id": "a\0b"}]}),
    "escape in a name": json_answer({"data": [{"id": "\x1b]0;x\x07"}]}),
    "surrogate in a name": json_answer({"data": [{"id": "\ud800"}]}),
    "no UTF-8": http_answer(b'{"data": [{"id": "\xff"}]}'),
    "nested": http_answer(b'{"data": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"),
    "half": http_answer(b'{"data": []}')[:-5],
    "endless": ENDLESS,
    "redirect": http_answer(b"", "302 Found", "Location: http://127.0.0.1:1/"),
    "no content": http_answer(b"", "204 No Content"),
    "error": json_answer({"error": {"message": "No.\n\x1b[31mtrioserve: all is well"}}, "400 Bad"),
    "error of null": json_answer({"error": None}, "500 Internal Server Error"),
    "error of a list": json_answer({"error": [{"message": "\x1b[2J"}]}, "503 Busy"),
    "nested error": http_answer(b'{"error": ' + b"[" * 100_000, "500 Internal Server Error"),
    "no HTTP": b"SSH-2.0-OpenSSH_9.6\r\n",
}

COMMANDS = ("ps", "usage", "launch", "run", "bench", "batch")


@pytest.fixture
def argv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[str]]:
    """The arguments of each command; agents are programs that must not run."""
    for name in ("pi", "opencode"):
        (tmp_path / name).write_text("#!/bin/sh\necho It runs.\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    line = {"custom_id": "a", "url": "/v1/completions", "body": {"prompt": "Hello"}}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    files = [str(tmp_path / name) for name in ("in.jsonl", "out.jsonl")]
    words = {
        "launch": ["launch", "pi"],
        "run": ["run", "one", "Hello"],
        "batch": ["batch", files[0], "-o", files[1]],
    }
    return {name: words.get(name, [name]) for name in COMMANDS}


def complaint(
    words: list[str],
    answers: Mapping[str, bytes | Iterable[bytes]],
    capfd: pytest.CaptureFixture[str],
) -> str:
    """Run a command with a server; returns the one line that it has written."""
    with serving_paths(answers) as url:
        code = main([*words, "--url", url])
    text = "".join(capfd.readouterr())
    assert code == 1, text
    assert text.endswith("\n"), text
    assert text[:-1].isprintable(), text
    assert len(text) < 1000
    return text.replace(url, "URL")


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("name", ANSWERS)
def test_one_line_tells_what_a_server_sends(
    command: str, name: str, argv: dict[str, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    assert "URL" in complaint(argv[command], {"/": ANSWERS[name]}, capfd)


@pytest.mark.parametrize("command", ["launch", "run"])
@pytest.mark.parametrize("name", ["HTML", "nulls", "nested", "endless", "redirect", "half"])
def test_properties_of_a_model(
    command: str, name: str, argv: dict[str, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    answers = {"/v1/models": MODELS, "/props": ANSWERS[name]}
    assert "URL" in complaint(argv[command], answers, capfd)


@pytest.mark.parametrize(
    "event",
    [None, "<html>", "null", '{"choices": null}', '{"choices": [null]}', '{"error": {}}',
     '{"choices": ' + "[" * 100_000, '{"error": {"message": "\\u001b[2J"}}'],
)  # fmt: skip
def test_an_answer_of_a_chat(
    event: str | None, argv: dict[str, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    stream = "<html>" if event is None else f"data: {event}\n\ndata: [DONE]\n\n"
    chat = http_answer(stream.encode(), "200 OK", "Content-Type: text/event-stream")
    answers = {"/v1/models": MODELS, "/props": PROPS, "/v1/chat": chat}
    assert "URL" in complaint(argv["run"], answers, capfd)


@pytest.mark.parametrize("row", [
    {"key": "a\x1b[2J"}, {"requests": None}, {"seconds": []}, {"output_tokens": 10**30}, {"day": {}}
])  # fmt: skip
def test_rows_of_usage(
    row: dict[str, Any], argv: dict[str, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    good = {"day": "2026-01-01", "key": "alice", "model": "m", "requests": 1, "input_tokens": 2,
            "cached_input_tokens": 0, "output_tokens": 3, "seconds": 0.5}  # fmt: skip
    answers = {"/": json_answer({"data": [good | row]})}
    assert "URL" in complaint(argv["usage"], answers, capfd)


@pytest.mark.parametrize("size", [10**400, "5", -1], ids=["huge", "text", "negative"])
def test_sizes_of_models(
    size: Any, argv: dict[str, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    answers = {"/": json_answer({"data": [{"id": "one", "meta": {"size": size}}]})}
    assert "URL" in complaint(argv["ps"], answers, capfd)


@pytest.mark.parametrize("agent", ["pi", "opencode"])
@pytest.mark.parametrize("model", ["--yolo", "{file:/etc/passwd}", "${{ secrets.KEY }}"])
def test_a_model_is_no_flag_of_an_agent(
    agent: str, model: str, argv: dict[str, list[str]], capfd: pytest.CaptureFixture[str]
) -> None:
    answers = {"/v1/models": json_answer({"data": [{"id": model}]}), "/props": PROPS}
    assert f"the name {model!r}" in complaint(["launch", agent], answers, capfd)
