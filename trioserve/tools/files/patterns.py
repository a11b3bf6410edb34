"""Globs and regular expressions that come from models.

RE2 matches them: it takes bounded memory, does not hold the GIL, and takes time that is at most the
size of the expression times the length of the text. Like ripgrep, it has neither lookaround nor
backreferences. A search can be neither interrupted nor cancelled, so large expressions are refused,
and texts are searched in pieces.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import re2

from trioserve.errors import ToolFileError

_MAX_BYTES = 2**24  # of memory, for one expression
_MAX_GLOB = 1024  # characters
_MAX_PATTERN = 2**14

#: Instructions of the program that RE2 makes of an expression. Compiling a larger one, and matching
#: it, may take seconds.
_MAX_PROGRAM = 10_000

#: A limit of memory for the first try: a program of more than `_MAX_PROGRAM` instructions, roughly,
#: fails within it after milliseconds.
_BYTES_FOR_SIZE = 16 * _MAX_PROGRAM * 3 // 2

#: Instructions times bytes of text that RE2 matches in less than a second.
_STEP = 2**27
_MAX_STEP = 2**20  # bytes


def shown(name: str) -> str:
    """The name of a file as text; bytes that are not UTF-8 are replaced."""
    return os.fsencode(name).decode("utf-8", "replace")


class LinePattern:
    """A regular expression that finds lines. Longer ones than `max_line` bytes are not searched."""

    def __init__(self, pattern: str, *, literal: bool = False, ignore_case: bool = False) -> None:
        """Compile `pattern`, which is plain text if `literal`.

        Raises:
            ToolFileError: it is no regular expression.
        """
        _check_text(pattern, "invalid regex", _MAX_PATTERN)
        options = _options()
        options.never_nl = True  # so that no match has more than one line
        options.case_sensitive = not ignore_case
        if literal:
            pattern = re2.escape(pattern)
        self._pattern = _compile(pattern, options, "invalid regex", flags="(?m)")
        self._step = min(_STEP // self._pattern.programsize, _MAX_STEP)
        self.max_line = _STEP // self._pattern.programsize
        #: A line was too long.
        self.has_skipped = False

    def find(self, data: bytes, begin: int, may_go_on: Callable[[], bool]) -> int | None:
        """The place of the first match from `begin` on, which is the beginning of a line.

        `may_go_on` is asked about once a second, and ends the search.
        """
        while begin <= len(data) and may_go_on():
            end = data.rfind(b"\n", begin, begin + self._step)
            if end < 0 or begin + self._step >= len(data):
                end = data.find(b"\n", begin + self._step)
                end = len(data) if end < 0 else end
            if end - begin > self.max_line:
                self.has_skipped = True
            elif (match := self._pattern.search(data, begin, end)) is not None:
                return int(match.start())
            begin = end + 1
        return None


class Glob:
    """A pattern of paths: ``*`` and ``?`` match within a name, ``**`` any names, ``[a-z]`` one
    character. Without a ``/``, it is matched against the last name of a path."""

    def __init__(self, glob: str) -> None:
        """Compile `glob`.

        Raises:
            ToolFileError: it is too long, or no text.
        """
        _check_text(glob, "invalid glob pattern", _MAX_GLOB)
        self._of_names = "/" not in glob
        if not self._of_names and not glob.startswith(("**/", "/")):
            glob = "**/" + glob
        expression = _expression_of(glob)
        self._pattern = _compile(expression, _options(), "invalid glob pattern", flags="(?s)")

    def matches(self, path: str) -> bool:
        """Match it with a path, relative to the directory that was listed."""
        text = shown(path.rpartition("/")[2] if self._of_names else path)
        return self._pattern.fullmatch(text.encode()) is not None


class Filter:
    """The files to search: those that one glob matches, and another does not."""

    def __init__(self, include: str, exclude: str) -> None:
        """Compile both; an empty `exclude` excludes nothing.

        Raises:
            ToolFileError: one is too long, or no text.
        """
        self._include = None if include in ("", "**") else Glob(include)
        self._exclude = Glob(exclude) if exclude else None

    def has(self, path: str) -> bool:
        if self._include is not None and not self._include.matches(path):
            return False
        return self._exclude is None or not self._exclude.matches(path)


def _check_text(pattern: str, complaint: str, max_chars: int) -> None:
    if len(pattern) > max_chars:
        raise ToolFileError(f"{complaint}: it has more than {max_chars} characters")
    try:
        pattern.encode()
    except UnicodeEncodeError:
        raise ToolFileError(f"{complaint}: it has half of a surrogate pair") from None


def _options() -> re2.Options:
    options = re2.Options()
    options.max_mem = _MAX_BYTES
    options.log_errors = False
    return options


def _compile(pattern: str, options: re2.Options, complaint: str, *, flags: str) -> re2._Regexp:
    data = (flags + pattern).encode()
    try:
        max_mem, options.max_mem = options.max_mem, _BYTES_FOR_SIZE
        re2.compile(data, options)
        options.max_mem = max_mem
        return re2.compile(data, options)
    except re2.error as error:
        reason = error.args[0].decode("utf-8", "replace")  # has the pattern, or a part of it
        raise ToolFileError(f"{complaint}: {reason.replace(flags, '')}") from None


def _expression_of(glob: str) -> str:
    parts = []
    place = 0
    while place < len(glob):
        part, place = _next_part(glob, place)
        parts.append(part)
    return "".join(parts)


def _next_part(glob: str, place: int) -> tuple[str, int]:
    """The expression for the part at `place`, and the place after it."""
    if glob.startswith("**/", place) and (place == 0 or glob[place - 1] == "/"):
        return "(?:.*/)?", place + 3
    if glob.startswith("**", place):
        return ".*", place + 2
    simple = {"*": "[^/]*", "?": "[^/]"}.get(glob[place])
    if simple is not None:
        return simple, place + 1
    # A "]" or "-" that comes first is one of the characters.
    first = place + 1 + glob.startswith(("!", "^"), place + 1)
    end = glob.find("]", first + 1) if glob[place] == "[" else -1
    if end < 0:
        return re2.escape(glob[place]), place + 1
    inverted = "^/" if first > place + 1 else ""
    return f"[{inverted}{_class_of(glob[first:end])}]", end + 1


def _class_of(characters: str) -> str:
    """The inside of a character class; a range that runs backwards is its three characters."""
    parts = []
    while characters:
        first, last = characters[0], characters[2:3]
        if characters[1:2] == "-" and last and first <= last:
            parts.append(f"{re2.escape(first)}-{re2.escape(last)}")
            characters = characters[3:]
        else:
            parts.append(re2.escape(first))
            characters = characters[1:]
    return "".join(parts)
