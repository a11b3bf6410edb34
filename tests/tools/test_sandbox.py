"""Paths lead nowhere but into the directories of the sandbox."""

from __future__ import annotations

import ctypes
import itertools
import os
import shutil
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from trioserve.errors import InvalidRequestError, ToolFileError
from trioserve.tools.files.host import HostFiles
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


_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE

_numbers = itertools.count()

_names = st.sampled_from(["a", "b", "c", "inside", "outside", ".", "..", "...", "~", ""])
_relative = st.lists(_names, min_size=1, max_size=6).map("/".join)
#: "@" stands for the directory that the sandbox is in.
_paths = st.one_of(_relative, _relative.map("@/inside/{}".format), _relative.map("@/{}".format))
_trees = st.lists(
    st.tuples(st.sampled_from(["file", "dir", "link", "fifo"]), _relative, _paths), max_size=12
)


def build(top: Path, tree: list[tuple[str, str, str]]) -> Path:
    inside = top / "inside"
    inside.mkdir(parents=True)
    (top / "outside").mkdir()
    for name in ("a", "b", "outside/a"):
        (top / name).touch()
    for kind, where, target in tree:
        path = inside / where
        if not os.path.normpath(path).startswith(f"{inside}/"):
            continue  # to make it is not what is tested
        with suppress(OSError):
            if kind == "file":
                path.touch(exist_ok=False)
            elif kind == "dir":
                path.mkdir(parents=True)
            elif kind == "link":
                path.symlink_to(target.replace("@", str(top)))
            else:
                os.mkfifo(path)
    return inside


@contextmanager
def built(folder: Path, tree: list[tuple[str, str, str]]) -> Iterator[Path]:
    top = folder / str(next(_numbers))
    try:
        yield build(top, tree)
    finally:
        shutil.rmtree(top)


def found_by_kernel(path: str) -> str | None:
    """The real path of the regular file that the kernel finds."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        real = os.readlink(f"/proc/self/fd/{opened}")
        return real if os.path.isfile(real) else None
    finally:
        os.close(opened)


def found_by_sandbox(inside: Path, path: str) -> str | None:
    sandbox = PathSandbox([str(inside)])
    try:
        opened = sandbox.open_file(sandbox.resolve(path, str(inside)))
    except (OSError, ToolFileError):
        return None
    try:
        return os.readlink(f"/proc/self/fd/{opened}")
    finally:
        os.close(opened)


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="there is no /proc")
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=_trees, path=_paths)
def test_what_is_opened_is_what_the_kernel_finds_inside(
    tmp_path: Path, tree: list[tuple[str, str, str]], path: str
) -> None:
    with built(tmp_path, tree) as inside:
        path = path.replace("@", str(inside.parent))
        in_home = path == "~" or path.startswith("~/")
        whole = os.path.expanduser(path) if in_home else os.path.join(inside, path)
        kernels = found_by_kernel(whole)
        ours = found_by_sandbox(inside, path)
        if kernels is not None:
            is_inside = kernels.startswith(f"{inside}/")
            assert ours == (kernels if is_inside else None)
        assert ours is None or ours.startswith(f"{inside}/")


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=_trees, path=_paths)
def test_nothing_is_written_outside(
    tmp_path: Path, tree: list[tuple[str, str, str]], path: str
) -> None:
    with built(tmp_path, tree) as inside:
        before = outside_of(inside)
        files = HostFiles(PathSandbox([str(inside)]))
        with suppress(ToolFileError):
            files.write(path.replace("@", str(inside.parent)), b"new")
            assert b"new" in [
                Path(found).read_bytes()
                for found in map(str, inside.rglob("*"))
                if os.path.isfile(found)
            ]
        assert outside_of(inside) == before


def outside_of(inside: Path) -> dict[str, bytes]:
    top = inside.parent
    return {
        str(path): b"" if path.is_dir() else path.read_bytes()
        for path in (*top.glob("*"), *(top / "outside").rglob("*"))
    }


@pytest.mark.skipif(sys.platform != "linux", reason="it needs renameat2")
def test_links_that_come_and_go_lead_nowhere(tmp_path: Path) -> None:
    """A directory is a link to one outside every other moment, as a command may arrange it."""
    inside, outside = tmp_path / "inside", tmp_path / "outside"
    for folder in (inside / "sub", outside):
        folder.mkdir(parents=True)
        (folder / "file").write_text(folder.name)
    (inside / "link").symlink_to(outside)
    stopping = threading.Event()
    libc = ctypes.CDLL(None, use_errno=True)

    def swap() -> None:
        link, sub = os.fsencode(inside / "link"), os.fsencode(inside / "sub")
        while not stopping.is_set():
            assert libc.renameat2(_HERE, link, _HERE, sub, _EXCHANGE) == 0

    files = HostFiles(PathSandbox([str(inside)]))
    texts: set[str] = set()
    swapper = threading.Thread(target=swap)
    swapper.start()
    try:
        for _ in range(1500):
            with suppress(ToolFileError), files.open("sub/file") as file:
                texts.add(file.read().decode())
            with suppress(ToolFileError):
                files.write("sub/new", b"new")
    finally:
        stopping.set()
        swapper.join()
    assert texts == {"sub"}
    assert os.listdir(outside) == ["file"]
    sub = inside / ("link" if (inside / "sub").is_symlink() else "sub")
    assert sorted(os.listdir(sub)) == ["file", "new"]
