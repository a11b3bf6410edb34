"""`edit_file`: replaces pieces of a file, each of which it must have exactly once."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise
from typing import Annotated, NamedTuple

import attrs
import msgspec
from msgspec import Meta

from trioserve.errors import ToolFileError
from trioserve.tools.builtin.diffs import unified_diff
from trioserve.tools.builtin.file_tool import FileTool
from trioserve.tools.builtin.write import encoded
from trioserve.tools.files.patterns import shown
from trioserve.tools.files.store import FileStore
from trioserve.tools.tool import ToolCallContext, ToolResult

_MAX_FILE = 4 * 2**20

#: What models write in place of a character that is on no keyboard: llama-server's, in which each
#: stands for one character. Other whitespace at the end of a line does not matter, either.
_ALIKE = str.maketrans(
    dict.fromkeys("\u2018\u2019\u201a\u201b", "'")
    | dict.fromkeys("\u201c\u201d\u201e\u201f", '"')
    | dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
    | dict.fromkeys("\u00a0\u202f\u205f\u3000" + "".join(map(chr, range(0x2002, 0x200B))), " ")
)


class Edit(msgspec.Struct):
    """One replacement."""

    old_text: Annotated[
        str,
        Meta(
            description="Text to replace; the file must have it exactly once, and outside of what "
            "other edits replace"
        ),
    ]
    new_text: Annotated[str, Meta(description="Text in its place")]


class EditArguments(msgspec.Struct):
    """What `edit_file` replaces."""

    path: Annotated[str, Meta(description="Path of the file")]
    edits: Annotated[list[Edit], Meta(description="Replacements, one or more")]


class EditFile(FileTool[EditArguments]):
    """Edits a file."""

    ARGUMENTS = EditArguments
    NAME = "edit_file"
    DISPLAY_NAME = "Edit file"
    DESCRIPTION = (
        "Edit a file by replacing text. The file must have each edits[].old_text exactly once, "
        "before any of the edits. Edits may not overlap; make one of those that are close to each "
        "other. To replace the whole file, use write_file."
    )
    WRITES = True

    def run(
        self, arguments: EditArguments, files: FileStore, context: ToolCallContext
    ) -> ToolResult:
        """Edit it."""
        old, new = _edited(arguments, files)
        files.write(arguments.path, new.encode("utf-8", "surrogateescape"))
        answer = {
            "result": "file edited successfully",
            "path": shown(arguments.path),
            "edits_applied": len(arguments.edits),
        }
        return ToolResult(answer, _diff(arguments.path, old, new))

    def diff(self, arguments: EditArguments, files: FileStore) -> str:
        """Compare what is there with what will be."""
        return _diff(arguments.path, *_edited(arguments, files))


def _diff(path: str, old: str, new: str) -> str:
    return unified_diff(path, _printable(old), _printable(new))


def _printable(text: str) -> str:
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def _edited(arguments: EditArguments, files: FileStore) -> tuple[str, str]:
    """What the file has, and what it is to have. Bytes that are not UTF-8 stay as they are."""
    path = arguments.path
    _check(arguments.edits)
    with files.open(path) as file:
        data = file.read(_MAX_FILE + 1)
    if len(data) > _MAX_FILE:
        raise ToolFileError(f"file too large to edit: {path} (max {_MAX_FILE} bytes)")
    old = data.decode("utf-8", "surrogateescape")
    new = with_edits(path, old, arguments.edits)
    if new == old:
        raise ToolFileError("no changes made: the replacement(s) produced identical content")
    return old, new


def _check(edits: list[Edit]) -> None:
    if not edits:
        raise ToolFileError('"edits" must be a non-empty array')
    for number, edit in enumerate(edits):
        if not edit.old_text:
            raise ToolFileError(f"edits[{number}].old_text must not be empty")
        encoded(edit.old_text, f"edits[{number}].old_text")
        encoded(edit.new_text, f"edits[{number}].new_text")


def with_edits(path: str, text: str, edits: list[Edit]) -> str:
    """The text of a file with all of the edits made.

    Raises:
        ToolFileError: one cannot be made; the message names it.
    """
    # Models write "\n" at the end of lines, whatever ends those of the file.
    has_crlf = "\r\n" in text and text.count("\n") == text.count("\r\n")
    if has_crlf:
        unix = [Edit(_unix(edit.old_text), _unix(edit.new_text)) for edit in edits]
        return with_edits(path, _unix(text), unix).replace("\n", "\r\n")
    source = _Source(text)
    found = sorted(
        _Found(*source.find(path, number, edit.old_text), number)
        for number, edit in enumerate(edits)
    )
    for one, other in pairwise(found):
        if one.end > other.begin:
            raise ToolFileError(
                f"edits[{one.number}] and edits[{other.number}] overlap in {path}; merge them into "
                "one edit or target disjoint regions"
            )
    return "".join(_pieces(text, found, edits))


def _unix(text: str) -> str:
    return text.replace("\r\n", "\n")


class _Found(NamedTuple):
    """Where an edit is to be made."""

    begin: int
    end: int
    number: int


def _pieces(text: str, found: Iterable[_Found], edits: list[Edit]) -> Iterable[str]:
    at = 0
    for begin, end, number in found:
        yield text[at:begin]
        yield edits[number].new_text
        at = end
    yield text[at:]


@attrs.frozen
class _Source:
    """A text in which pieces are found, exactly or nearly."""

    text: str

    @cached_property
    def _normal(self) -> _Normal:
        return _Normal.of(self.text)

    def find(self, path: str, number: int, wanted: str) -> tuple[int, int]:
        """Where the only piece is that is, or else looks, like `wanted`."""
        count = _count(self.text, wanted)
        begin = self.text.find(wanted)
        end = begin + len(wanted)
        if count == 0:
            normal = _Normal.of(wanted).text
            count = _count(self._normal.text, normal) if normal else 0
            begin, end = self._normal.find(normal)
        if count == 0:
            raise ToolFileError(
                f"could not find edits[{number}].old_text in {path}, it must match the file's "
                "current content exactly"
            )
        if count > 1:
            raise ToolFileError(
                f"found {count} occurrences of edits[{number}].old_text in {path}, it must be "
                "unique"
            )
        return begin, end


@attrs.frozen
class _Normal:
    """A text without what does not matter, and where each of its lines was in that text."""

    text: str
    lines: list[int]
    places: list[int]

    @classmethod
    def of(cls, text: str) -> _Normal:
        """Make it of a text."""
        parts, lines, places = [], [], []
        at_normal = at = 0
        for line in text.split("\n"):
            part = line.translate(_ALIKE).rstrip(" \t\r")
            parts.append(part)
            lines.append(at_normal)
            places.append(at)
            at_normal += len(part) + 1
            at += len(line) + 1
        return cls("\n".join(parts), lines, places)

    def find(self, wanted: str) -> tuple[int, int]:
        """Where the first piece like this is in the text that this was made of."""
        begin = self.text.find(wanted)
        return self._place_of(begin), self._place_of(begin + len(wanted))

    def _place_of(self, at: int) -> int:
        line = bisect_right(self.lines, at) - 1
        return self.places[line] + at - self.lines[line]


def _count(text: str, wanted: str) -> int:
    """How often a piece is in a text, where it may overlap itself."""
    count = text.count(wanted)
    if count == 1 and text.find(wanted, text.find(wanted) + 1) >= 0:
        return 2
    return count
