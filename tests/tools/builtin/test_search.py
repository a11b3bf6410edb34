"""`file_glob_search` and `grep_search`."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.file_tools import call
from trioserve.tools.builtin import search
from trioserve.tools.builtin.search import FindFiles, GrepFiles


def make(folder: Path, *paths: str) -> None:
    for path in paths:
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text("text")


async def find(folder: Path, **arguments: Any) -> list[str]:
    """The paths that are found, after a look at whether the text says the same."""
    result = await call(FindFiles, folder, path=".", **arguments)
    entries = result.answer["entries"]
    lines = [one["path"] + ("/" if one["type"] == "dir" else "") + "\n" for one in entries]
    assert result.text.startswith("".join(lines) + "\n---\nTotal matches: ")
    return [one["path"] for one in entries]


async def test_files_are_found_in_order_with_where_they_are(tmp_path: Path) -> None:
    make(tmp_path, "b.py", "a/c.py", "a/d.txt", "e/f/g.py")
    assert await find(tmp_path) == ["b.py", "a/c.py", "a/d.txt", "e/f/g.py"]
    result = await call(FindFiles, tmp_path, path="a", include="*.py")
    assert result.answer == {
        "plain_text_response": "c.py\n\n---\nTotal matches: 1\n",
        "entries": [{"path": "c.py", "type": "file"}],
        "base": str(tmp_path / "a"),
    }


@pytest.mark.parametrize(
    ("arguments", "paths"),
    [
        ({"include": "*.py"}, ["b.py", "a/c.py", "e/f/g.py"]),
        ({"include": "*.py", "exclude": "c*"}, ["b.py", "e/f/g.py"]),
        ({"include": "e/**"}, ["e/f/g.py"]),
        ({"include": "f/*.py"}, ["e/f/g.py"]),
        ({"include": "**/*.py", "exclude": "a/*"}, ["b.py", "e/f/g.py"]),
        ({"max_depth": 1}, ["b.py"]),
        ({"max_depth": 2, "type": "all"}, ["a", "b.py", "e", "a/c.py", "e/f"]),
        ({"type": "dir"}, ["a", "e", "e/f"]),
    ],
)
async def test_what_is_found(tmp_path: Path, arguments: dict[str, Any], paths: list[str]) -> None:
    make(tmp_path, "b.py", "a/c.py", "e/f/g.py")
    assert await find(tmp_path, **arguments) == paths


async def test_results_are_limited_and_counted(tmp_path: Path) -> None:
    make(tmp_path, *(f"{number:03}" for number in range(120)))
    assert len(await find(tmp_path, limit=1000)) == 100
    result = await call(FindFiles, tmp_path, path=".", limit=2)
    assert result.text == (
        "000\n001\n\n---\nTotal matches: 120\n[2 results limit reached (120 total matches). Refine "
        "the glob pattern to narrow the search.]\n"
    )


async def test_directories_that_programs_have_made_are_named_and_not_entered(
    tmp_path: Path,
) -> None:
    make(tmp_path, "build/a/b", "src/c", "src/node_modules/d")
    assert await find(tmp_path, type="all") == ["build", "src", "src/c", "src/node_modules"]
    result = await call(FindFiles, tmp_path, path="build")
    assert [one["path"] for one in result.answer["entries"]] == ["a/b"]


async def test_links_are_found_and_not_followed_and_not_shown_if_they_lead_outside(
    tmp_path: Path,
) -> None:
    inside = tmp_path / "inside"
    make(tmp_path, "inside/a", "outside/b", "inside/sub/c")
    (inside / "d").symlink_to("a")
    (inside / "up").symlink_to(".")
    (inside / "out").symlink_to("../outside")
    (inside / "out-file").symlink_to("../outside/b")
    (inside / "nowhere").symlink_to("none")
    os.mkfifo(inside / "fifo")
    assert await find(inside) == ["a", "d", "sub/c"]
    assert await find(inside, type="all") == ["a", "d", "sub", "up", "sub/c"]


async def test_names_that_are_not_unicode_are_shown_as_well_as_can_be(tmp_path: Path) -> None:
    (tmp_path / os.fsdecode(b"a\xff")).write_text("text")
    assert await find(tmp_path, include="a*") == ["a�"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"type": "bogus"}, 'invalid type: bogus (expected "file", "dir" or "all")'),
        ({"limit": 0}, "invalid limit: 0 (expected 1 or more)"),
        ({"include": "*" * 5000}, "invalid glob pattern: it has more than 1024 characters"),
        ({"path": "none"}, "path does not exist or is not a directory: none"),
        ({"path": "a"}, "path does not exist or is not a directory: a"),
    ],
)
async def test_invalid_searches_of_files(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    make(tmp_path, "a")
    result = await call(FindFiles, tmp_path, **{"path": ".", **arguments})
    assert result.answer == {"error": message}


FOOT = "\n---\nTotal matches: {}\n"


async def grep(folder: Path, pattern: str, path: str = ".", **arguments: Any) -> str:
    return (await call(GrepFiles, folder, path=path, pattern=pattern, **arguments)).text


async def test_lines_are_found_in_files(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "a.py").write_text("one\ntwo\n")
    (tmp_path / "sub" / "b.py").write_text("Two one")
    (tmp_path / "sub" / "c.txt").write_text("one")
    assert await grep(tmp_path, "one", include="*.py") == (
        "a.py:one\nsub/b.py:Two one\n" + FOOT.format(2)
    )
    assert await grep(tmp_path, "^t", ignore_case=True, return_line_numbers=True) == (
        "a.py:2:two\nsub/b.py:1:Two one\n" + FOOT.format(2)
    )
    assert await grep(tmp_path, "one$", "sub/b.py") == "sub/b.py:Two one\n" + FOOT.format(1)
    assert await grep(tmp_path, "one", exclude="sub/*") == "a.py:one\n" + FOOT.format(1)


async def test_context_is_shown_around_each_match(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\nx\n4\nx\n")
    assert await grep(tmp_path, "x", context_lines=1) == (
        "a-2-2\na:3:x\na-4-4\n--\na-4-4\na:5:x\n--\n" + FOOT.format(2)
    )
    assert await grep(tmp_path, "1", context_lines=50) == (
        "a:1:1\na-2-2\na-3-x\na-4-4\na-5-x\n--\n" + FOOT.format(1)
    )


@pytest.mark.parametrize(
    ("text", "pattern", "lines"),
    [
        (b"", "^$", []),
        (b"\n", "^$", [1]),
        (b"a\n\nb", "^$", [2]),
        (b"a\n", "^$", []),
        (b"a\r\nb\r\n", "a$", [1]),
        (b"a\nb", "a\\sb", []),
        (b"a\nb", "[^x]b", []),
        (b"a\n b", "\\s", [2]),
        (b"foo\nbar\nfoo bar", "foo[^x]*bar", [3]),
        (b"x*x", "x\\*", [1]),
        ("é\nÉ".encode(), "(?i)é", [1, 2]),
        (b"\xff\nb", "b", [2]),
    ],
)
async def test_a_match_is_in_one_line(
    tmp_path: Path, text: bytes, pattern: str, lines: list[int]
) -> None:
    (tmp_path / "a").write_bytes(text)
    found = await grep(tmp_path, pattern, return_line_numbers=True)
    assert [int(number) for number in re.findall(r"^a:(\d+):", found, re.MULTILINE)] == lines


async def test_random_texts_give_what_a_search_line_by_line_gives(tmp_path: Path) -> None:
    rng = random.Random(1)
    for _ in range(30):
        text = "".join(rng.choices("ab \n", k=60))
        pattern = "".join(rng.choices(["a", "b", "[^a]", ".*", " ?", "^", "$", "(a|b)"], k=3))
        (tmp_path / "a").write_text(text)
        lines = text.removesuffix("\n").split("\n") if text else []
        expected = [number for number, line in enumerate(lines, 1) if re.search(pattern, line)]
        found = await grep(tmp_path, pattern, return_line_numbers=True)
        numbers = re.findall(r"^a:(\d+):", found, re.MULTILINE)
        assert [int(number) for number in numbers] == expected, (text, pattern)


async def test_plain_text_is_found_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("f(x)\nfx\n")
    assert await grep(tmp_path, "f(x)", literal=True) == "a:f(x)\n" + FOOT.format(1)


async def test_matches_and_output_are_limited(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x\n" * 101)
    text = await grep(tmp_path, "x")
    assert text.endswith(
        FOOT.format(100)
        + "[100 matches limit reached. Narrow the path/pattern/include to see more.]\n"
    )
    (tmp_path / "a").write_text("x\n" * 100)
    assert (await grep(tmp_path, "x")).endswith(FOOT.format(100))
    (tmp_path / "a").write_text((str("é" * 5000) + "\n") * 100)
    text = await grep(tmp_path, "é", context_lines=100)
    assert len(text) < 150_000
    assert "é" * 500 + " [10000 bytes]\n" in text


async def test_binary_and_large_files_are_not_searched(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x\0")
    (tmp_path / "b").write_text("x")
    (tmp_path / "c").write_text("x" * 10_000)
    os.truncate(tmp_path / "c", 2**40)  # which makes it binary after its beginning
    os.mkfifo(tmp_path / "fifo")
    text = await grep(tmp_path, "x")
    assert text == (
        "b:x\n" + FOOT.format(1) + "[1 files of more than 33554432 bytes were not searched]\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"pattern": "("}, "invalid regex: missing ): ("),
        ({"pattern": "\ud800"}, "invalid regex: it has half of a surrogate pair"),
        ({"path": "none"}, "path does not exist: none"),
        ({"path": "bin"}, "file is binary, and not text: bin"),
        ({"path": "fifo"}, "failed to open file: fifo (Not a regular file)"),
    ],
)
async def test_invalid_searches_in_files(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    (tmp_path / "bin").write_bytes(b"\0")
    os.mkfifo(tmp_path / "fifo")
    result = await call(GrepFiles, tmp_path, **{"path": ".", "pattern": "x", **arguments})
    assert result.is_error
    assert str(result.answer["error"]).startswith(message)


async def test_a_search_ends_in_time_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for n in range(3):
        (tmp_path / f"{n}").write_text("word\n" * 10)
    monkeypatch.setattr(search, "_MAX_SECONDS", 0.0)
    for path in (".", "0"):
        result = await call(GrepFiles, tmp_path, path=path, pattern="word")
        assert "Total matches: 0" in result.text
        assert "[results truncated: time budget" in result.text


async def test_lines_that_are_too_long_for_a_pattern_are_named(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("a" * 50_000 + "c\nabc\n")
    result = await call(GrepFiles, tmp_path, path="a", pattern="[ab]{0,900}" * 5 + "c")
    assert result.text.startswith("a:abc\n")
    assert "bytes were not searched; a shorter pattern finds longer lines]" in result.text
