"""Text for a terminal, with colors, and without other control characters.

Models, servers and files write much of it. An escape sequence in an answer could change the
clipboard, or what earlier lines say.
"""

from __future__ import annotations

import io
import re
from typing import TextIO

#: Control characters, except for tabs, the ends of lines, colors, and the removal of a line.
_CONTROL = re.compile(r"(?!\x1b\[(?:[0-9;]*m|K))[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")


class _Printable(io.TextIOWrapper):
    def write(self, text: str) -> int:
        super().write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))
        return len(text)


def printable(stream: TextIO) -> TextIO:
    """Give a stream that writes what is harmless, if `stream` is a terminal; else `stream`.

    What its encoding does not have is written as an escape sequence of Python: the path of a file
    may have bytes that are no UTF-8.
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
