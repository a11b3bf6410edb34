"""Log lines: their form, their level, and what libraries write."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import select
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from tests.support.command import Terminal
from trioserve.config import Config, logs
from trioserve.errors import ConfigError


@pytest.fixture(autouse=True)
def _as_it_was() -> Iterator[None]:
    """Put structlog back, so that other tests see what they expect."""
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_json_lines() -> None:
    stream = io.StringIO()
    logs.configure(Config(), stream)
    structlog.stdlib.get_logger("here").info("request ended", tokens=3)
    (line,) = lines(stream)
    assert list(line) == ["timestamp", "level", "logger", "event", "tokens"]
    assert line["timestamp"].endswith("Z")
    del line["timestamp"]
    assert line == {"level": "info", "logger": "here", "event": "request ended", "tokens": 3}


def test_pretty_lines_on_a_terminal() -> None:
    stream = Terminal()
    logs.configure(Config(), stream)
    structlog.stdlib.get_logger("here").info("request ended", tokens=3)
    assert "request ended" in stream.getvalue()
    assert "\x1b[" in stream.getvalue()
    assert not stream.getvalue().startswith("{")


def test_a_request_on_a_terminal_has_what_matters_and_no_control_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    stream = Terminal()
    logs.configure(Config(log_timestamps=False), stream)
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


def test_the_form_can_be_forced() -> None:
    stream = Terminal()
    logs.configure(Config(log_format="json"), stream)
    structlog.stdlib.get_logger("one").info("event")
    assert lines(stream)
    stream = io.StringIO()
    logs.configure(Config(log_format="pretty"), stream)
    structlog.stdlib.get_logger("two").info("event")
    assert "\x1b[" not in stream.getvalue()
    assert "event" in stream.getvalue()


def test_what_is_below_the_level_is_not_written() -> None:
    stream = io.StringIO()
    logs.configure(Config(log_level="warning"), stream)
    log = structlog.stdlib.get_logger("here")
    log.info("no")
    log.warning("yes")
    logging.getLogger("library").info("no")
    logging.getLogger("library").warning("yes")
    assert [line["event"] for line in lines(stream)] == ["yes", "yes"]


def test_the_request_id_is_on_every_line() -> None:
    stream = io.StringIO()
    logs.configure(Config(), stream)
    with structlog.contextvars.bound_contextvars(request_id="abc"):
        structlog.stdlib.get_logger("here").info("one")
        logging.getLogger("library").warning("two")
    structlog.stdlib.get_logger("here").info("three")
    assert [line.get("request_id") for line in lines(stream)] == ["abc", "abc", None]


def test_an_exception_has_its_traceback() -> None:
    stream = io.StringIO()
    logs.configure(Config(), stream)
    try:
        raise ValueError("boom")
    except ValueError:
        structlog.stdlib.get_logger("here").exception("bad")
        logging.getLogger("library").exception("worse %d", 1)
    ours, theirs = lines(stream)
    assert ours["event"] == "bad"
    assert "ValueError: boom" in ours["exception"]
    assert theirs["event"] == "worse 1"
    assert "ValueError: boom" in theirs["exception"]


def test_a_library_with_a_handler_of_its_own_is_not_written_twice() -> None:
    stream = io.StringIO()
    logs.configure(Config(), stream)
    library = logging.getLogger("library.with.handler")
    handler = logging.NullHandler()
    library.addHandler(handler)
    try:
        library.warning("written by its own handler")
    finally:
        library.removeHandler(handler)
    assert stream.getvalue() == ""


def test_configuring_again_replaces_the_handler() -> None:
    first, second = io.StringIO(), io.StringIO()
    logs.configure(Config(), first)
    logs.configure(Config(), second)
    logging.getLogger("library").warning("once")
    assert first.getvalue() == ""
    assert len(lines(second)) == 1


def test_a_log_file_gets_the_lines_as_json(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("before\n", encoding="utf-8")
    stream = Terminal()
    logs.configure(Config(log_file=str(path)), stream)
    structlog.stdlib.get_logger("here").info("request ended", tokens=3)
    logging.getLogger("a.library").warning("of old")
    assert "request ended" in stream.getvalue()
    assert not stream.getvalue().startswith("{")
    first, ours, theirs = path.read_text(encoding="utf-8").splitlines()
    assert first == "before"
    assert json.loads(ours)["tokens"] == 3
    assert json.loads(theirs)["event"] == "of old"
    assert json.loads(theirs)["level"] == "warning"
    logs.configure(Config(), stream)  # which closes the file
    structlog.stdlib.get_logger("there").info("no more")
    assert len(path.read_text(encoding="utf-8").splitlines()) == 3


def test_a_log_file_that_cannot_be_opened(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the log file .*no/log cannot be opened: No such file"):
        logs.configure(Config(log_file=str(tmp_path / "no" / "log")))


def test_colours_prefixes_and_times_can_be_left_out() -> None:
    stream = Terminal()
    logs.configure(Config(log_colors="off", log_prefix=False, log_timestamps=False), stream)
    structlog.stdlib.get_logger("here").info("request ended", tokens=3)
    assert stream.getvalue() == "request ended tokens=3\n"
    stream = io.StringIO()
    logs.configure(Config(log_colors="on", log_format="pretty"), stream)
    structlog.stdlib.get_logger("here").info("request ended")
    assert "\x1b[" in stream.getvalue()


def test_no_log() -> None:
    stream = io.StringIO()
    logs.configure(Config(log_level="off"), stream)
    structlog.stdlib.get_logger("here").error("request failed")
    logging.getLogger("a.library").error("failed")
    assert stream.getvalue() == ""


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
    """A file on a disk with room for so many bytes."""

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
    """What standard error is: text on a buffer on a raw file."""
    return io.TextIOWrapper(io.BufferedWriter(disk), line_buffering=True)


def test_lines_that_cannot_be_written_are_counted_and_told() -> None:
    disk = Disk()
    logs.configure(Config(), text_on(disk))
    ours, theirs = structlog.stdlib.get_logger("here"), logging.getLogger("library")
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
    assert [line["event"] for line in events] == [
        "written",
        "5 log lines could not be written",
        "again",
    ]
    assert events[1]["to"] == "standard error"


def test_a_line_about_lost_lines_may_be_lost_too() -> None:
    disk = Disk()
    logs.configure(Config(), text_on(disk))
    ours = structlog.stdlib.get_logger("here")
    ours.info("lost")
    disk.room = 10_000
    ours.info("x" * 9_800)  # leaves no room for the next one
    disk.room = 10_000
    ours.info("written")
    assert "3 log lines could not be written" not in disk.written.decode()
    assert "2 log lines could not be written" in disk.written.decode()


def test_a_log_file_that_is_full_loses_its_lines_alone(tmp_path: Path) -> None:
    stream = io.StringIO()
    logs.configure(Config(log_file="/dev/full"), stream)
    structlog.stdlib.get_logger("here").info("one")
    logging.getLogger("library").warning("two")
    assert [line["event"] for line in lines(stream)] == ["one", "two"]


def test_standard_error_that_was_closed() -> None:
    stream = io.StringIO()
    logs.configure(Config(), stream)
    log = structlog.stdlib.get_logger("here")
    stream.close()
    log.info("lost")
    logging.getLogger("library").warning("lost")


@pytest.mark.skipif(not hasattr(select, "poll"), reason="this system cannot tell")
@pytest.mark.parametrize("size", [0, 8192], ids=["PYTHONUNBUFFERED", "buffered"])
def test_a_pipe_that_nobody_reads_holds_up_nobody(size: int) -> None:
    reader, writer = os.pipe()
    with open(reader, "rb", buffering=0) as reading, open(writer, "wb", buffering=size) as raw:
        writing = io.TextIOWrapper(raw, write_through=True)
        logs.configure(Config(), writing)
        log = structlog.stdlib.get_logger("here")
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
    stream = io.StringIO()
    logs.configure(Config(), stream)
    try:
        raise ValueError("its message")
    except ValueError:
        logging.getLogger(name).exception("Error parsing SSE message")
    assert not stream.getvalue()
