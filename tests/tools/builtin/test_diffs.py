"""Diffs say what has changed, and take bounded time and space."""

from __future__ import annotations

import random
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from trioserve.tools.builtin.diffs import unified_diff

HEADER = "--- a/f\n+++ b/f\n"


def test_equal_texts_have_no_hunks() -> None:
    assert unified_diff("f", "a\n", "a\n") == HEADER


def test_changes_are_shown_with_three_lines_around() -> None:
    old = "".join(f"{number}\n" for number in range(20))
    new = old.replace("9\n", "nine\n", 1)
    assert unified_diff("f", old, new) == (
        HEADER + "@@ -7,7 +7,7 @@\n 6\n 7\n 8\n-9\n+nine\n 10\n 11\n 12\n"
    )


def test_a_missing_newline_is_said() -> None:
    assert unified_diff("f", "a", "a\n") == (
        HEADER + "@@ -1 +1 @@\n-a\n\\ No newline at end of file\n+a\n"
    )


def test_only_a_newline_ends_a_line() -> None:
    assert unified_diff("f", "", "a\x0b\u2028\rb\n") == (
        HEADER + "@@ -0,0 +1 @@\n+a\x0b\u2028\rb\n"
    )


@pytest.mark.system
@pytest.mark.skipif(shutil.which("patch") is None, reason="there is no patch")
def test_patch_makes_the_new_text_of_the_old_one(tmp_path: Path) -> None:
    rng = random.Random(1)
    for size in [0, 1, 5, 30, 300] * 4:
        old = "".join(rng.choices(["a\n", "b\n", "c c\n", "\n", "unique %d\n"], k=size))
        old = "".join(line.replace("%d", str(rng.random())) for line in old.splitlines(True))
        lines = old.splitlines(True)
        for _ in range(rng.randrange(6)):
            lines[rng.randrange(len(lines) + 1) :][:1] = []
            lines.insert(rng.randrange(len(lines) + 1), rng.choice(["a\n", "new\n"]))
        new = "".join(lines)
        (tmp_path / "f").write_text(old)
        diff = unified_diff("f", old, new)
        if diff != HEADER:
            subprocess.run(["patch", "-s", "f"], input=diff.encode(), cwd=tmp_path, check=True)
        assert (tmp_path / "f").read_text() == new


@pytest.mark.parametrize("kinds", [2, 150, 3000])
def test_a_rewrite_of_a_large_file_takes_little_time_and_space(kinds: int) -> None:
    rng = random.Random(1)
    old = "".join(f"{rng.randrange(kinds)}\n" for _ in range(100_000))
    new = "".join(f"{rng.randrange(kinds)}\n" for _ in range(100_000))
    begin = time.thread_time()
    diff = unified_diff("f", old, new)
    assert time.thread_time() - begin < 2
    assert len(diff) < 70_000
    assert re.search(
        r"\n\[\d{6} lines with \d+ characters are not shown\]\n@@ -\d+ \+\d+ @@\n", diff
    )
    assert diff.endswith(f"+{new.splitlines()[-1]}\n")


def test_many_places_that_are_hard_to_compare_take_little_time() -> None:
    rng = random.Random(1)

    def text() -> str:
        parts = ("".join(rng.choices(["a\n", "b\n"], k=100)) + f"{n}\n" for n in range(5000))
        return "".join(parts)

    old, new = text(), text()
    assert len(old) + len(new) < 2**21
    begin = time.thread_time()
    assert "are not shown]\n" in unified_diff("f", old, new)
    assert time.thread_time() - begin < 3


def test_of_what_is_too_large_it_is_said_that_it_changes() -> None:
    assert unified_diff("f", "", "a\n" * 2**21) == "Files a/f and b/f differ\n"
    large = "a\n" * 2**22
    assert unified_diff("f", large + "b\n", large + "c\n") == (
        HEADER + f"@@ -{2**22 - 2},4 +{2**22 - 2},4 @@\n a\n a\n a\n-b\n+c\n"
    )


def test_of_a_long_line_there_are_both_ends() -> None:
    diff = unified_diff("f", None, "a" + "x" * 10**6 + "b", most=80)
    assert diff == (
        "--- /dev/null\n+++ b/f\n@@ -0,0 +1 @@\n+axxxxxxxx…xxxxxxxxxb\n"
        "[999983 characters of this line are not shown]\n\\ No newline at end of file\n"
    )


def test_of_a_long_diff_there_are_both_ends_and_their_place_in_the_file() -> None:
    old = "".join(f"{number}\n" for number in range(1, 100))
    new = old.replace("3\n", "three\n").replace("77\n", "new\n77\n")
    assert unified_diff("f", old, new, most=300) == (
        HEADER + "@@ -1,6 +1,6 @@\n 1\n 2\n-3\n[83 lines with 479 characters are not shown]\n"
        "@@ -93 +94 @@\n-93\n+9three\n 94\n 95\n 96\n"
    )
