"""Directories: bounds of a walk, changes during it, and the files that .gitignore names."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import re2
import trio
from pathspec import GitIgnoreSpec

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


def repository(folder: Path, files: dict[str, str]) -> Path:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    (folder / ".git" / "info").mkdir(parents=True, exist_ok=True)
    return folder


async def listed(folder: Path, path: str = ".", **arguments: str) -> set[str]:
    result = await call(FindFiles, folder, path=path, **arguments)
    return {one["path"] for one in result.answer["entries"]}


FILES = {
    ".gitignore": "*.o\nout/\n!keep.o\n/top\n# comment\n[z-a]\n!\n\ndoc/**/*.html\ncaf\u00e9\n",
    ".git/info/exclude": "private\n",
    "a.o": "", "keep.o": "", "a.c": "", "top": "", "sub/top": "", "private": "", "sub/private": "",
    "out/x.c": "", "sub/out/y.c": "", "build/w": "", "node_modules/m": "",
    "sub/.gitignore": "!a.o\n*.c\n", "sub/a.o": "", "sub/b.o": "", "sub/c.c": "",
    "doc/a.html": "", "doc/x/y/b.html": "", "doc/c.txt": "", "sub/café": "",
}  # fmt: skip


async def test_ignored_files_are_not_listed(tmp_path: Path) -> None:
    folder = repository(tmp_path, FILES)
    assert await listed(folder) == {
        ".gitignore", "keep.o", "a.c", "sub/top", "build/w", "node_modules/m", "sub/.gitignore",
        "sub/a.o", "doc/c.txt",
    }  # fmt: skip


@pytest.mark.system
@pytest.mark.skipif(shutil.which("git") is None, reason="there is no Git")
async def test_git_says_the_same(tmp_path: Path) -> None:
    folder = repository(tmp_path, FILES)
    command = ["git", "-C", str(folder)]
    await trio.run_process([*command, "init", "-q"])
    (folder / ".git" / "info" / "exclude").write_text(FILES[".git/info/exclude"])
    for path in (".", "sub", "doc"):
        told = await trio.run_process(
            [*command[:2], str(folder / path), "ls-files", "-z", "--others", "--exclude-standard"],
            capture_stdout=True,
            env={"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "HOME": "/none"},
        )
        assert await listed(folder, path) == set(told.stdout.decode().split("\0")) - {""}


async def test_directories_are_listed_whatever_is_ignored(tmp_path: Path) -> None:
    folder = repository(tmp_path, FILES)
    assert {"out", "sub/out", "build"} <= await listed(folder, type="dir")


async def test_a_directory_that_is_ignored_is_searched_when_it_is_named(tmp_path: Path) -> None:
    folder = repository(tmp_path, FILES)
    assert await listed(folder, "out") == {"x.c"}


async def test_a_repository_around_the_sandbox_is_not_looked_at(tmp_path: Path) -> None:
    folder = repository(tmp_path, FILES)
    assert "a.o" in await listed(folder / "sub", include="*.o")
    assert "b.o" in await listed(folder / "sub", include="*.o")


async def test_patterns_that_re2_cannot_combine_are_used_all_the_same(tmp_path: Path) -> None:
    """The last pattern that matches decides, in whatever set it is."""
    many = [f"*{n}*x*" for n in range(1900)]
    lines = ["*.o", *many[:900], "out/", "!keep.o", *many[900:], "late.c"]
    files = {".gitignore": "\n".join(lines), "a.o": "", "keep.o": "", "a.c": "", "late.c": "",
             "out/a.c": ""}  # fmt: skip
    with pytest.raises(re2.error):
        GitIgnoreSpec.from_lines(lines, backend="re2")
    assert await listed(repository(tmp_path, files)) == {".gitignore", "keep.o", "a.c"}


async def test_a_program_that_the_repository_names_is_not_run(tmp_path: Path) -> None:
    folder = repository(tmp_path, {"a": "", ".git/HEAD": "ref: refs/heads/main\n"})
    (folder / ".git" / "config").write_text(f"[core]\n\tfsmonitor = touch {tmp_path}/ran\n")
    (folder / ".git" / "objects").mkdir()
    (folder / ".git" / "refs").mkdir()
    assert await listed(folder) == {"a"}
    assert not (tmp_path / "ran").exists()
