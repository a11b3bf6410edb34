"""Any path, through any links: what is opened is what the kernel finds, or nothing, and inside."""

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

from trioserve.errors import ToolFileError
from trioserve.tools.files.host import HostFiles
from trioserve.tools.sandbox import PathSandbox

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
