"""Going through directories: what bounds it, and what it survives."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import trio

from tests.support.file_tools import call
from trioserve.tools.builtin.search import FindFiles, GrepFiles
from trioserve.tools.files import host
from trioserve.tools.files.host import list_folder
from trioserve.tools.sandbox import PathSandbox

TRUNCATED = "[results truncated: time budget or unreadable directory]\n"


async def test_a_search_that_takes_too_long_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("text")
    monkeypatch.setattr(host, "_MAX_SECONDS", 0.0)
    for result in (
        await call(FindFiles, tmp_path, path="."),
        await call(GrepFiles, tmp_path, path=".", pattern="text"),
    ):
        assert result.text == "\n---\nTotal matches: 0\n" + TRUNCATED


async def test_of_a_directory_with_too_many_names_some_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(5):
        (tmp_path / str(number)).touch()
    monkeypatch.setattr(host, "_MAX_ENTRIES", 3)
    result = await call(FindFiles, tmp_path, path=".")
    assert "Total matches: 3\n" in result.text
    assert result.text.endswith(TRUNCATED)
    monkeypatch.setattr(host, "_MAX_ENTRIES", 5)
    assert TRUNCATED not in (await call(FindFiles, tmp_path, path=".")).text


async def test_a_directory_that_goes_away_or_becomes_a_link_is_left_out(tmp_path: Path) -> None:
    for path in ("inside/a/x", "inside/b/x", "inside/c/x", "outside/secret"):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).touch()
    inside = tmp_path / "inside"

    def list_while_it_changes() -> tuple[list[str], bool]:
        listing = list_folder(PathSandbox([str(inside)]), str(inside), "all", 0)
        names = [next(listing.entries).path]
        os.rename(inside / "a", tmp_path / "a")
        (inside / "a").symlink_to(tmp_path / "outside")
        (inside / "b" / "x").unlink()
        (inside / "b").rmdir()
        names += [entry.path for entry in listing.entries]
        return names, listing.truncated

    assert await trio.to_thread.run_sync(list_while_it_changes) == (["a", "b", "c", "c/x"], True)


async def test_a_tree_that_is_deeper_than_a_path_is_long_is_gone_through(tmp_path: Path) -> None:
    folder = os.open(tmp_path, os.O_RDONLY)
    try:
        for _ in range(25):
            os.mkdir("x" * 200, dir_fd=folder)
            inner = os.open("x" * 200, os.O_RDONLY, dir_fd=folder)
            os.close(folder)
            folder = inner
    finally:
        os.close(folder)
    result = await call(FindFiles, tmp_path, path=".", type="dir")
    assert len(result.answer["entries"]) == 25
    result = await call(GrepFiles, tmp_path, path=".", pattern="text")
    assert result.text == "\n---\nTotal matches: 0\n"
