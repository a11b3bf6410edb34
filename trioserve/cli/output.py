"""Output of commands: notes, tables and lists, with colors where the terminal has them."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import attrs

from trioserve.config.flags import as_flags
from trioserve.errors import ConfigError, TrioServeError

#: Control characters, except for tabs, the ends of lines, colors, and the removal of a line.
_CONTROL = re.compile(r"(?!\x1b\[(?:[0-9;]*m|K))[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class _Printable(io.TextIOWrapper):
    def write(self, text: str) -> int:
        super().write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
        return len(text)


def printable(stream: TextIO) -> TextIO:
    """A stream that leaves out other control characters, if `stream` is a terminal; else `stream`.

    Models, servers and files write much of the text, and an escape sequence in an answer could
    change the clipboard, or what earlier lines say. Characters that the encoding does not have are
    written as escape sequences of Python: the path of a file may have bytes that are no UTF-8.
    """
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    stream.reconfigure(errors="backslashreplace")
    if not stream.isatty():
        return stream
    stream.flush()
    return _Printable(
        stream.buffer, encoding=stream.encoding, errors=stream.errors, line_buffering=True
    )


#: Codes of colors that can be read on black and on white.
BOLD, DIM, RED, GREEN, YELLOW, BLUE = "1", "2", "31", "32", "33", "34"


def has_colors(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """True if a stream takes colors: see https://no-color.org and https://force-color.org."""
    if environ.get("NO_COLOR"):
        return False
    if environ.get("FORCE_COLOR", "0") not in ("", "0"):
        return True
    return stream.isatty() and environ.get("TERM") != "dumb"


def styled(text: str, code: str, stream: TextIO | None = None) -> str:
    """Give a text its color, if the stream (standard output) takes colors."""
    return f"\x1b[{code}m{text}\x1b[0m" if has_colors(stream or sys.stdout) else text


def note(text: str, code: str = YELLOW) -> None:
    """Print a line for the user on standard error, after the name of the program."""
    print(f"{styled('trioserve:', code, sys.stderr)} {text}", file=sys.stderr)


def complain(error: TrioServeError) -> str:
    """Print an error, with settings by their flags, and return its text."""
    text = as_flags(error.message) if isinstance(error, ConfigError) else error.message
    note(text, RED)
    return text


def write_file(path: Path, text: str) -> None:
    """Write a file that the user has named. Raises ConfigError: it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}") from None


@attrs.frozen
class Column:
    """A column of a list: `name` is its key in JSON, and in capitals the heading without another.

    `text` formats a value, and `missing` stands for None.
    """

    name: str
    text: Callable[[Any], str] = str
    right: bool = False
    heading: str = ""
    missing: str = ""


def print_list(
    columns: Sequence[Column], rows: Iterable[Mapping[str, Any]], *, as_json: bool = False
) -> None:
    """Print rows as a table, or with all that they have as a list in JSON."""
    if as_json:
        print(json.dumps(list(rows), indent=2, ensure_ascii=False, default=str))
        return
    head = [one.heading or one.name.upper() for one in columns]
    cells = [
        [one.missing if (it := row[one.name]) is None else one.text(it) for one in columns]
        for row in rows
    ]
    right = {i for i, one in enumerate(columns) if one.right}
    print(table([head, *cells], right=right, has_head=True), end="")


def table(
    rows: Sequence[Sequence[str]], *, right: Iterable[int] = (), has_head: bool = False
) -> str:
    """Format rows as a table; the columns with numbers in `right` are right-aligned."""
    widths, numbers = [max(map(len, column)) for column in zip(*rows, strict=True)], {*right}
    lines = [
        "  ".join(
            cell.rjust(width) if i in numbers else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    if has_head:
        lines[0] = styled(lines[0], BOLD)
    return "".join(f"{line}\n" for line in lines)
