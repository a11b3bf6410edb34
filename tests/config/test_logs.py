"""Log lines: their form, their level, and what libraries write."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import re
import select
import subprocess
import sys
from pathlib import Path
from typing import Any, TextIO

import pytest
import structlog

from tests.support.command import Terminal
from trioserve.config import Config, logs
from trioserve.errors import ConfigError


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def configured(stream: TextIO, **settings: Any) -> tuple[Any, logging.Logger]:
    """Configure the log; gives a logger of trioserve, and one of a library."""
    logs.configure(Config(**settings), stream)
    return structlog.stdlib.get_logger("here"), logging.getLogger("library")


def test_json_lines() -> None:
    stream = io.StringIO()
    ours, _ = configured(stream)
    ours.info("request ended", tokens=3)
    (line,) = lines(stream)
    assert list(line) == ["timestamp", "level", "logger", "event", "tokens"]
    assert line.pop("timestamp").endswith("Z")
    assert line == {"level": "info", "logger": "here", "event": "request ended", "tokens": 3}


PLAIN = {"log_colors": "off", "log_prefix": False, "log_timestamps": False}


@pytest.mark.parametrize(
    ("stream", "settings", "form"),
    [
        (Terminal, {}, r".*\x1b\[.*request ended.*"),
        (Terminal, {"log_format": "json"}, r"\{.*request ended.*\}"),
        (Terminal, PLAIN, "request ended tokens=3"),
        (io.StringIO, {"log_format": "pretty"}, r"[^\x1b{]*request ended[^\x1b]*"),
        (io.StringIO, {"log_format": "pretty", "log_colors": "on"}, r".*\x1b\[.*"),
    ],
)
def test_the_form_of_lines(stream: type[io.StringIO], settings: dict[str, Any], form: str) -> None:
    ours, _ = configured(output := stream(), **settings)
    ours.info("request ended", tokens=3)
    assert re.fullmatch(form, output.getvalue().rstrip("\n"))


def test_a_request_on_a_terminal_has_what_matters_and_no_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    configured(stream := Terminal(), log_timestamps=False)
    log = structlog.stdlib.get_logger("trioserve.request")
    about = {"method": "POST", "client": "::1", "agent": "curl/8", "request_id": "r1"}
    tokens = {"prompt_tokens": 27, "cached_tokens": 26, "completion_tokens": 8, "task": 5}
    times = {"queue_ms": 0.2, "ttft_ms": 26.4, "total_ms": 1520.0}
    log.info("request", path="/a", status=200, model="m", **about, **tokens, **times)
    log.warning("request", path="/\x1b[2J\n", status=500, error='not "it"', **about)
    log.info("ready", path="a b", request_id="r1")
    assert stream.getvalue().splitlines() == [
        "info    POST /a 200 model=m tokens=27+8 cached=26 first=26ms total=1.5s client=::1/curl/8",
        r'warning POST /\x1b[2J\n 500 error="not \"it\"" client=::1/curl/8 request_id=r1',
        'info    ready path="a b"',
    ]


@pytest.mark.parametrize(("level", "events"), [("warning", ["yes", "yes"]), ("off", [])])
def test_lines_below_the_level_are_not_written(level: str, events: list[str]) -> None:
    ours, theirs = configured(stream := io.StringIO(), log_level=level)
    for log in (ours, theirs):
        log.info("no")
        log.warning("yes")
    assert [line["event"] for line in lines(stream)] == events


def test_the_request_id_is_on_every_line() -> None:
    ours, theirs = configured(stream := io.StringIO())
    with structlog.contextvars.bound_contextvars(request_id="abc"):
        ours.info("one")
        theirs.warning("two")
    ours.info("three")
    assert [line.get("request_id") for line in lines(stream)] == ["abc", "abc", None]


def test_an_exception_has_its_traceback() -> None:
    ours, theirs = configured(stream := io.StringIO())
    try:
        raise ValueError("boom")
    except ValueError:
        ours.exception("bad")
        theirs.exception("worse %d", 1)
    written = lines(stream)
    assert [line["event"] for line in written] == ["bad", "worse 1"]
    assert all("ValueError: boom" in line["exception"] for line in written)


def test_a_library_with_a_handler_of_its_own_is_not_written_twice() -> None:
    _, library = configured(stream := io.StringIO())
    library.addHandler(handler := logging.NullHandler())
    try:
        library.warning("written by its own handler")
    finally:
        library.removeHandler(handler)
    assert stream.getvalue() == ""


def test_configuring_again_replaces_the_handler() -> None:
    configured(first := io.StringIO())
    _, library = configured(second := io.StringIO())
    library.warning("once")
    assert first.getvalue() == ""
    assert len(lines(second)) == 1


def test_a_log_file_gets_the_lines_as_json(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n", encoding="utf-8")
    ours, library = configured(stream := Terminal(), log_file=str(path))
    ours.info("request ended", tokens=3)
    library.warning("of old")
    assert "request ended" in stream.getvalue()
    assert not stream.getvalue().startswith("{")
    first, *written = path.read_text(encoding="utf-8").splitlines()
    assert first == "before"
    assert [json.loads(line)["level"] for line in written] == ["info", "warning"]
    assert json.loads(written[0])["tokens"] == 3
    ours, _ = configured(stream)  # which closes the file
    ours.info("no more")
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3


def test_a_log_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the log file .*no/log cannot be opened: No such file"):
        logs.configure(Config(log_file=str(tmp_path / "no" / "log")))


@pytest.mark.system
def test_a_program_that_configures_no_logging_sees_warnings() -> None:
    program = """
from trioserve.log import get_logger
log = get_logger("x")
log.info("not shown")
log.bind(task=1).warning("shown")
import structlog
structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(0))
log.info("as configured")
"""
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert "shown" in ran.stderr and "task" in ran.stderr
    assert "not shown" not in ran.stderr + ran.stdout
    assert "as configured" in ran.stdout


# -- lines that cannot be written


class Disk(io.RawIOBase):
    """A file on a disk with room for `room` bytes."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.written = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        taken = bytes(data)[: self.room]
        if not taken:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.room -= len(taken)
        self.written += taken
        return len(taken)


def text_on(disk: Disk) -> io.TextIOWrapper:
    """Text on a buffer on a raw file, as standard error is."""
    return io.TextIOWrapper(io.BufferedWriter(disk), line_buffering=True)


def test_lines_that_cannot_be_written_are_counted_and_told() -> None:
    disk = Disk()
    ours, theirs = configured(text_on(disk))
    for _ in range(2):
        ours.info("lost")
        theirs.warning("lost")
    disk.room = 30  # less than a line
    ours.info("torn")
    disk.room = 10_000
    ours.info("written")
    ours.info("again")
    torn, *lines = disk.written.decode().splitlines()
    assert len(torn) == 30
    events = [json.loads(line) for line in lines]
    lost = "5 log lines could not be written"
    assert [line["event"] for line in events] == ["written", lost, "again"]
    assert events[1]["to"] == "standard error"


def test_a_line_about_lost_lines_may_be_lost_too() -> None:
    disk = Disk()
    ours, _ = configured(text_on(disk))
    ours.info("lost")
    disk.room = 10_000
    ours.info("x" * 9_800)  # leaves no room for the next one
    disk.room = 10_000
    ours.info("written")
    assert "3 log lines could not be written" not in disk.written.decode()
    assert "2 log lines could not be written" in disk.written.decode()


def test_a_log_file_that_is_full_loses_its_lines_alone() -> None:
    ours, theirs = configured(stream := io.StringIO(), log_file="/dev/full")
    ours.info("one")
    theirs.warning("two")
    assert [line["event"] for line in lines(stream)] == ["one", "two"]


def test_standard_error_that_was_closed() -> None:
    ours, theirs = configured(stream := io.StringIO())
    stream.close()
    ours.info("lost")
    theirs.warning("lost")


@pytest.mark.skipif(not hasattr(select, "poll"), reason="this system cannot tell")
@pytest.mark.parametrize("size", [0, 8192], ids=["PYTHONUNBUFFERED", "buffered"])
def test_a_pipe_that_nobody_reads_holds_up_nobody(size: int) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as reading, open(writer, "wb", buffering=size) as raw:
        writing = io.TextIOWrapper(raw, write_through=True)
        log, _ = configured(writing)
        for number in range(3000):  # of 100 bytes: more than a pipe holds
            log.info("event", number=number)
        log.info("x" * 10_000)
        got = bytearray()
        while b"could not be written" not in got:
            got += reading.read(2**16)
            log.info("last")
    whole = [json.loads(line) for line in got.splitlines() if line.endswith(b"}")]
    numbers = [line["number"] for line in whole if "number" in line]
    assert numbers == list(range(len(numbers))) and 100 < len(numbers) < 3000
    told = next(line["event"] for line in whole if "could not" in line["event"])
    assert int(told.split()[0]) >= 3000 - len(numbers)


@pytest.mark.parametrize("name", ["client", "mcp.client.streamable_http"])
def test_an_mcp_server_cannot_fill_the_log_with_tracebacks(name: str) -> None:
    configured(stream := io.StringIO())
    try:
        raise ValueError("its message")
    except ValueError:
        logging.getLogger(name).exception("Error parsing SSE message")
    assert not stream.getvalue()
