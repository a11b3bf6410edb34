"""`edit_file`."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import trio
from hypothesis import given, settings, strategies as st

from tests.support.file_tools import call, tool_in
from trioserve.errors import InvalidRequestError
from trioserve.tools.builtin import file_tools
from trioserve.tools.builtin.file_tools import Edit, EditFile, with_edits
from trioserve.tools.tool import ToolCallContext


def edit(old: str, new: str) -> dict[str, str]:
    return {"old_text": old, "new_text": new}


@pytest.mark.parametrize(
    ("before", "edits", "after"),
    [
        (b"1\n2\n3\n", [("2", "two"), ("3\n", "3\n4\n")], b"1\ntwo\n3\n4\n"),
        (b"1\n2\n3\n", [("3", "C"), ("1", "A")], b"A\n2\nC\n"),
        (b"ab", [("a", "b"), ("b", "a")], b"ba"),
        (b"a\xffb", [("b", "c")], b"a\xffc"),
        (b"abc", [("b", "")], b"ac"),
        # CRLF stays where it was, however the model writes its lines.
        (b"1\r\n2\r\n", [("1\n2", "3\n4\n5")], b"3\r\n4\r\n5\r\n"),
        (b"1\r\n2\r\n", [("1\r\n", "x\r\n")], b"x\r\n2\r\n"),
        (b"1\r\n2\n3\n", [("2\n3", "x")], b"1\r\nx\n"),
        # Text that looks alike is found where no text is equal.
        ("a = \u201cx\u201d \u2014 y  \nz\n".encode(), [('"x" - y\nz', "w")], b"a = w\n"),
        ("a\u00a0b\n".encode(), [("a b", "c")], b"c\n"),
        (b"a  \nb\n", [("a\nb", "c")], b"c\n"),
        (b"a  \nb\n", [("b   ", "c")], b"a  \nc\n"),
        (b"if a:  \n", [("if a:", "if b:")], b"if b:  \n"),
        ("\u2018a\u2019 'a'".encode(), [("'a'", "b")], "\u2018a\u2019 b".encode()),
    ],
)
async def test_pieces_are_replaced(
    tmp_path: Path, before: bytes, edits: list[tuple[str, str]], after: bytes
) -> None:
    (tmp_path / "a").write_bytes(before)
    result = await call(EditFile, tmp_path, path="a", edits=[edit(*one) for one in edits])
    assert result.answer == {
        "result": "file edited successfully", "path": "a", "edits_applied": len(edits)
    }  # fmt: skip
    assert (tmp_path / "a").read_bytes() == after


@pytest.mark.parametrize(
    ("edits", "message"),
    [
        ([], '"edits" must be a non-empty array'),
        ([("", "x")], "edits[0].old_text must not be empty"),
        ([("1", "x"), ("none", "x")],
         "could not find edits[1].old_text in a, it must match the file's current content exactly"),
        ([("dup", "x")], "found 2 occurrences of edits[0].old_text in a, it must be unique"),
        ([("ooo", "x")], "found 2 occurrences of edits[0].old_text in a, it must be unique"),
        ([("'q'", "x")], "found 2 occurrences of edits[0].old_text in a, it must be unique"),
        ([("1\n2", "x"), ("2", "x")],
         "edits[0] and edits[1] overlap in a; merge them into one edit or target disjoint regions"),
        ([("1", "1")], "no changes made: the replacement(s) produced identical content"),
        ([("1", "\ud800")], "edits[0].new_text has half of a surrogate pair"),
    ],
)  # fmt: skip
async def test_edits_that_cannot_be_made_change_nothing(
    tmp_path: Path, edits: list[tuple[str, str]], message: str
) -> None:
    text = "1\n2\ndup\ndup\noooo\n\u2018q\u2019 \u2018q\u2019\n"
    (tmp_path / "a").write_text(text)
    tool = tool_in(tmp_path, EditFile)
    arguments = {"path": "a", "edits": [edit(*one) for one in edits]}
    result = await tool.call(arguments, ToolCallContext())
    assert result.answer == {"error": message}
    assert await tool.preview(arguments, ToolCallContext()) is None
    assert (tmp_path / "a").read_text() == text


async def test_the_diff_is_shown_before_and_after(tmp_path: Path) -> None:
    lines = [f"line {number}\n" for number in range(5000)]
    (tmp_path / "a").write_text("".join(lines))
    tool = tool_in(tmp_path, EditFile)
    arguments = {"path": "a", "edits": [edit("line 2\n", "two\n"), edit("line 4990\n", "")]}
    expected = (
        "--- a/a\n+++ b/a\n@@ -1,6 +1,6 @@\n line 0\n line 1\n-line 2\n+two\n line 3\n line 4\n"
        " line 5\n@@ -4988,7 +4988,6 @@\n line 4987\n line 4988\n line 4989\n-line 4990\n"
        " line 4991\n line 4992\n line 4993\n"
    )
    assert await tool.preview(arguments, ToolCallContext()) == expected
    assert (tmp_path / "a").read_text() == "".join(lines)
    assert (await tool.call(arguments, ToolCallContext())).diff == expected


async def test_edits_of_one_file_at_the_same_time_are_all_kept(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("".join(f"<{number}>" for number in range(20)))
    tool = tool_in(tmp_path, EditFile)
    async with trio.open_nursery() as nursery:
        for number in range(20):
            arguments = {"path": "a", "edits": [edit(f"<{number}>", f"({number})")]}
            nursery.start_soon(tool.call, arguments, ToolCallContext())
    assert (tmp_path / "a").read_text() == "".join(f"({number})" for number in range(20))


async def test_the_number_of_edits_is_bounded(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("".join(f"<{number}>" for number in range(257)))
    edits = [edit(f"<{number}>", "x") for number in range(257)]
    with pytest.raises(InvalidRequestError, match="Expected `array` of length <= 256") as caught:
        await call(EditFile, tmp_path, path="a", edits=edits)
    assert caught.value.param == "edits"
    result = await call(EditFile, tmp_path, path="a", edits=edits[1:])
    assert result.answer["edits_applied"] == 256


async def test_edits_take_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a").write_text("12")
    monkeypatch.setattr(file_tools, "_MAX_EDIT_SECONDS", 0.0)
    result = await call(EditFile, tmp_path, path="a", edits=[edit("1", "3"), edit("2", "4")])
    assert result.answer == {"error": "it takes too long to find edits[0].old_text in a"}
    assert (tmp_path / "a").read_text() == "12"


async def test_edits_end_when_they_are_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("".join(f"<{number}>" for number in range(200)))
    looked_for = []
    find = file_tools._found

    def found(text: str, wanted: str) -> tuple[int, int]:
        looked_for.append(wanted)
        if len(looked_for) == 10:
            trio.from_thread.run_sync(scope.cancel)
        return find(text, wanted)

    monkeypatch.setattr(file_tools, "_found", found)
    with trio.CancelScope() as scope:
        edits = [edit(f"<{number}>", "x") for number in range(200)]
        await call(EditFile, tmp_path, path="a", edits=edits)
    assert scope.cancelled_caught
    assert len(looked_for) == 10
    assert (tmp_path / "a").read_text().startswith("<0>")


async def test_a_file_that_is_too_large_or_not_there_is_an_error(tmp_path: Path) -> None:
    with (tmp_path / "a").open("wb") as file:
        file.truncate(2**40)
    result = await call(EditFile, tmp_path, path="a", edits=[edit("a", "b")])
    assert result.answer == {"error": "file too large to edit: a (max 4194304 bytes)"}
    result = await call(EditFile, tmp_path, path="b", edits=[edit("a", "b")])
    assert result.answer == {"error": "failed to open file: b (No such file or directory)"}


#: Pieces of lines, each with those that are taken for the same.
_PIECES = [
    ["a"], ["b"], ["'", "\u2018", "\u2019"], ["-", "\u2014"], [" ", "\u00a0"],
    ["\n", " \n", "\t\n"],
]  # fmt: skip
_texts = st.lists(st.sampled_from(range(len(_PIECES))), max_size=12)


@settings(max_examples=150, deadline=None)
@given(before=_texts, found=_texts, after=_texts, rng=st.randoms(use_true_random=False))
def test_what_is_around_an_edit_stays_as_it_is(
    before: list[int], found: list[int], after: list[int], rng: Random
) -> None:
    """Exactly the piece that looks like `old_text` is replaced, or the edit is refused."""

    def written(text: list[int]) -> str:
        return "".join(rng.choice(_PIECES[piece]) for piece in text)

    parts = [written(before), "<" + written(found) + ">", written(after)]
    wanted = "<" + "".join(_PIECES[piece][0] for piece in found) + ">"
    arguments = EditFile("f", [Edit(wanted, "new")])
    new = with_edits("f", "".join(parts), arguments.edits)
    assert new == parts[0] + "new" + parts[2]
