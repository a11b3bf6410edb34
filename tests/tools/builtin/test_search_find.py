"""`file_glob_search`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.file_tools import call
from trioserve.tools.builtin.search import FindFiles


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
async def test_what_cannot_be_searched_is_an_error_for_the_model(
    tmp_path: Path, arguments: dict[str, Any], message: str
) -> None:
    make(tmp_path, "a")
    result = await call(FindFiles, tmp_path, **{"path": ".", **arguments})
    assert result.answer == {"error": message}
