"""Text of others in a terminal."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys

import pytest

from trioserve.cli.output import printable


class Terminal(io.BytesIO):
    def isatty(self) -> bool:
        return True


def shown(*pieces: str) -> str:
    written = Terminal()
    plain = io.TextIOWrapper(written, encoding="utf-8")
    stream = printable(plain)
    assert stream is not plain
    for piece in pieces:
        stream.write(piece)
    stream.flush()
    return written.getvalue().decode()


@pytest.mark.parametrize(
    ("pieces", "expected"),
    [
        (["one\ttwo\r\n", "世界 \x1b[2mthought\x1b[0m\x1b[K"], None),
        (["\x1b]52;c;cm0gLXJmIH4=\x07"], "\ufffd]52;c;cm0gLXJmIH4=\ufffd"),
        (["\x1b[2J\x1b[1;1H"], "\ufffd[2J\ufffd[1;1H"),
        (["\x1b", "]0;title\x1b\\"], "\ufffd]0;title\ufffd\\"),
        (["\x9b2J\x00\x08\x7f"], "\ufffd2J\ufffd\ufffd\ufffd"),
    ],
    ids=["harmless", "clipboard", "screen", "in two pieces", "single characters"],
)
def test_a_terminal_obeys_nothing_but_colors(pieces: list[str], expected: str | None) -> None:
    assert shown(*pieces) == (expected or "".join(pieces))


def test_files_and_pipes_get_all() -> None:
    stream = io.TextIOWrapper(io.BytesIO())
    assert printable(stream) is stream


@pytest.mark.system
@pytest.mark.skipif(sys.platform != "linux", reason="needs a terminal of Linux")
def test_the_command_shows_no_name_that_a_terminal_obeys() -> None:
    ours, theirs = pty.openpty()
    argv = [sys.executable, "-m", "trioserve", "show", "-m", "/none/\x1b]0;title\x07.gguf"]
    with subprocess.Popen(argv, stdout=theirs, stderr=theirs, stdin=subprocess.DEVNULL) as process:
        process.wait()
    os.close(theirs)
    output = os.read(ours, 4096)
    os.close(ours)
    assert b"title" in output and b"\x1b]" not in output and b"\x07" not in output
