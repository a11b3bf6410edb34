"""The folder of a router's sockets."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from trioserve.router.socket_folder import socket_folder

HOLD = """
import sys
from trioserve.router.socket_folder import socket_folder
with socket_folder() as path:
    print(path, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    with_room = Path(tempfile.mkdtemp(dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(with_room))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return with_room


def test_it_is_ours_alone_and_goes_with_the_block() -> None:
    with socket_folder() as path:
        assert path.stat().st_mode & 0o777 == 0o700
        (path / "1.sock").touch()
    assert not path.exists()


def test_the_path_is_short(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 90)
    deep.mkdir()
    monkeypatch.setenv("TMPDIR", str(deep))
    monkeypatch.setattr(tempfile, "tempdir", None)
    with socket_folder() as path:
        assert len(str(path)) < 60
    assert not list(deep.iterdir())


@pytest.mark.system
def test_what_a_killed_router_left_is_removed(temporary: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with holder:
        assert holder.stdout is not None
        left = Path(holder.stdout.readline().strip())
        os.utime(left, (0, 0))
        with socket_folder() as path:
            assert left.exists(), "its router runs"
        holder.kill()
    assert left.exists()
    made_just_now = temporary / "trioserve-router-new"
    made_just_now.mkdir()
    (made_just_now / "lock").touch()
    with socket_folder() as path:
        assert set(temporary.iterdir()) == {path, made_just_now}
