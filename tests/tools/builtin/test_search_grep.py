"""`grep_search`."""

from __future__ import annotations

import os
import random
import re
from pathlib import Path
from typing import Any

import pytest

from tests.support.file_tools import call
from trioserve.tools.builtin import search
from trioserve.tools.builtin.search import GrepFiles

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
async def test_what_cannot_be_searched_is_an_error_for_the_model(
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
