"""Paths lead nowhere but into the directories of the sandbox."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from trioserve.errors import InvalidRequestError, ToolFileError
from trioserve.tools.sandbox import PathSandbox


@pytest.fixture
def inside(tmp_path: Path) -> Path:
    folder = tmp_path / "inside"
    (folder / "sub").mkdir(parents=True)
    (folder / "file.txt").write_text("inside")
    (tmp_path / "outside.txt").write_text("outside")
    return folder


def read(sandbox: PathSandbox, path: str) -> str:
    with open(sandbox.open_file(sandbox.resolve(path))) as file:
        return file.read()


def test_paths_inside_are_opened(inside: Path) -> None:
    sandbox = PathSandbox([str(inside)])
    (inside / "link").symlink_to("file.txt")
    (inside / "sub" / "absolute").symlink_to(inside / "file.txt")
    paths = ["file.txt", "./sub/../file.txt", str(inside / "file.txt"), "link", "sub/absolute"]
    assert [read(sandbox, path) for path in paths] == ["inside"] * len(paths)


OUTSIDE = [
    "../outside.txt", "..", "/", "/..", "/etc/passwd", "sub/../../outside.txt", "link",
    "links/outside.txt", "~", "~/x", "/proc/self/root/etc/passwd", "../inside-not/x",
]  # fmt: skip


@pytest.mark.parametrize("path", OUTSIDE)
def test_paths_outside_are_refused_with_the_flag_that_says_so(inside: Path, path: str) -> None:
    (inside / "link").symlink_to("../outside.txt")
    (inside / "links").symlink_to(inside.parent)
    with pytest.raises(ToolFileError, match="--tools-dir"):
        PathSandbox([str(inside)]).resolve(path)


@pytest.mark.parametrize(
    ("path", "complaint"),
    [
        ("a\0b", "NUL"),
        ("\ud800", "characters"),
        ("a/" * 3000, "6000 bytes"),
        ("l0", "too many"),
    ],
)
def test_what_is_no_path_is_refused(inside: Path, path: str, complaint: str) -> None:
    (inside / "l0").symlink_to("l0")
    with pytest.raises(ToolFileError, match=complaint):
        PathSandbox([str(inside)]).resolve(path)


def test_a_chain_of_links_that_the_kernel_does_not_see_is_no_trap(inside: Path) -> None:
    for number in range(1100):  # more than Python's recursion allows
        (inside / f"l{number}").symlink_to(f"l{number + 1}")
    sandbox = PathSandbox([str(inside)])
    with suppress(ToolFileError):  # realpath finds the end of it since Python 3.13
        assert sandbox.resolve("none/../l0", str(inside)) == str(inside / "l1100")
    with pytest.raises(ToolFileError, match="too many"):
        sandbox.resolve("l0", str(inside))


def test_only_regular_files_are_opened_and_a_fifo_is_not_waited_for(inside: Path) -> None:
    os.mkfifo(inside / "fifo")
    sandbox = PathSandbox([str(inside)])
    for name, complaint in (("fifo", "Not a regular"), ("sub", "directory"), (".", "directory")):
        with pytest.raises(OSError, match=complaint):
            sandbox.open_file(sandbox.resolve(name))


def test_an_open_sandbox_has_everything_inside(inside: Path) -> None:
    sandbox = PathSandbox(["/"])
    assert sandbox.is_open
    assert read(sandbox, str(inside.parent / "outside.txt")) == "outside"


def test_home_is_the_current_directory_if_it_is_inside(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inside / "sub")
    assert PathSandbox().folders == (str(inside / "sub"),)
    assert PathSandbox([str(inside)]).home == str(inside / "sub")
    monkeypatch.chdir("/")
    assert PathSandbox([str(inside), "/usr"]).home == str(inside)


def test_the_directory_of_a_call_must_be_one_and_inside(inside: Path) -> None:
    sandbox = PathSandbox([str(inside)])
    assert sandbox.folder(str(inside / "sub")) == str(inside / "sub")
    for cwd, complaint in (("/etc", "outside"), ("file.txt", "not a directory")):
        with pytest.raises(InvalidRequestError, match=complaint) as caught:
            sandbox.folder(cwd)
        assert caught.value.param == "cwd"


def test_a_current_directory_that_was_removed_is_nobodys_home(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inside / "sub")
    sandbox = PathSandbox([str(inside)])
    (inside / "sub").rmdir()
    assert sandbox.home == str(inside)
    assert read(sandbox, "file.txt") == "inside"


def test_what_was_not_resolved_is_not_opened(inside: Path) -> None:
    sandbox = PathSandbox([str(inside)])
    with pytest.raises(ToolFileError, match="outside"), sandbox.open_folder("/etc"):
        raise AssertionError
    with pytest.raises(ToolFileError, match="outside"):
        sandbox.open_file(str(inside.parent / "outside.txt"))


def test_a_file_that_a_fifo_takes_the_place_of_is_not_opened(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sandbox = PathSandbox([str(inside)])
    real = sandbox.resolve("file.txt")
    open_it = os.open

    def open_late(name: str, flags: int, **where: int) -> int:
        if name == "file.txt":
            (inside / name).unlink()
            os.mkfifo(inside / name)
        return open_it(name, flags, **where)

    n_open = len(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(os, "open", open_late)
    with pytest.raises(OSError, match="Not a regular file"):
        sandbox.open_file(real)
    assert len(os.listdir("/proc/self/fd")) == n_open
