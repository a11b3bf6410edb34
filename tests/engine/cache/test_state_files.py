"""Files of states: whole or not there, and never taken for what they are not."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from trioserve.engine.cache import state_files
from trioserve.engine.cache.state_files import (
    DamagedFileError,
    StateFolder,
    StateHead,
    WriteEndedError,
)
from trioserve.types.media import ChunkOutline

IDENTITY = "0" * 32
ROOT = bytes(16)
IMAGE = ChunkOutline(b"an image's hash!", 5, 2).keys

#: Kills of a writer; the whole number takes minutes.
KILLS = int(os.environ.get("TRIOSERVE_KILLS", "20"))


def opened(base: Path, limit: int = 2**30, identity: str = IDENTITY) -> StateFolder:
    folder = StateFolder(base, identity, limit)
    folder.open()
    return folder


def write(folder: StateFolder, keys: list[int], state: bytes, root: bytes = ROOT) -> str:
    head = StateHead(root, keys, is_checkpoint=False)
    folder.write(head, state, lambda: False)
    return head.name


@pytest.mark.parametrize("is_checkpoint", [False, True])
@pytest.mark.parametrize("keys", [[1, 2, 2**31 - 1], [7, *IMAGE, 9]], ids=["tokens", "media"])
def test_a_state_is_read_back_as_it_was_written(
    tmp_path: Path, keys: list[int], is_checkpoint: bool
) -> None:
    folder = opened(tmp_path)
    written = StateHead(ROOT, keys, is_checkpoint)
    size = folder.write(written, b"state" * 99, lambda: False)
    head, state = folder.read(written.name)
    assert (head, state, head.size) == (written, b"state" * 99, size)
    assert folder.names() == {written.name} and folder.size == size


def test_only_the_user_may_read_them(tmp_path: Path) -> None:
    folder = opened(tmp_path / "made")
    path = folder.path / write(folder, [1], b"text")
    modes = [stat.S_IMODE(one.stat().st_mode) for one in (path, folder.path, tmp_path / "made")]
    assert modes == [0o600, 0o700, 0o700]


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_not_accepted(tmp_path: Path, data: st.DataObject) -> None:
    folder = opened(tmp_path)
    name = write(folder, [5, *IMAGE, 6], b"0123456789" * 20)
    path = folder.path / name
    before = path.read_bytes()
    damaged = bytearray(before)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(damaged) - 1))
        damaged[place] = data.draw(st.integers(0, 255))
    length = data.draw(st.integers(0, len(damaged)) | st.just(len(damaged)))
    path.write_bytes(damaged[:length] + data.draw(st.binary(max_size=3)))
    if path.read_bytes() == before:
        assert folder.read(name)[1] == b"0123456789" * 20
    else:
        with pytest.raises(DamagedFileError):
            folder.read(name)


def test_a_file_under_another_name_is_not_accepted(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    first, second = write(folder, [1], b"a"), write(folder, [2], b"b")
    (folder.path / first).replace(folder.path / second)
    with pytest.raises(DamagedFileError):
        folder.head(second)


def test_the_least_recently_used_files_go_first(tmp_path: Path) -> None:
    other = opened(tmp_path, identity="f" * 32)
    names = [write(other, [key], bytes(1000)) for key in range(4)]
    for seconds, name in enumerate(names):
        os.utime(other.path / name, (seconds, seconds))
    other.read(names[0])  # a use
    folder = opened(tmp_path, limit=3500)  # each has a header, too
    name = write(folder, [9], bytes(1000))
    assert folder.names() == {name}
    assert other.names() == {names[0], names[3]}
    assert folder.size <= 3500


def test_one_that_is_too_large_removes_none(tmp_path: Path) -> None:
    folder = opened(tmp_path, limit=2000)
    name = write(folder, [1], bytes(1000))
    with pytest.raises(WriteEndedError):
        write(folder, [2], bytes(2000))
    assert folder.names() == {name}


def test_the_number_of_files_is_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_files, "MAX_FILES", 3)
    folder = opened(tmp_path)
    for key in range(6):
        write(folder, [key], b"x")
    assert len(folder.names()) == 3


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "mine.kv").write_text("x" * 5000)
    (tmp_path / "notes" / ".mine.kv.part").write_text("x")
    (tmp_path / "notes" / ("0" * 32 + ".kv")).write_text("x" * 5000)
    folder = opened(tmp_path, limit=1000)
    write(folder, [1], bytes(100))
    assert len(list((tmp_path / "notes").iterdir())) == 3


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = opened(tmp_path)

    def full(_descriptor: int, _data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(state_files.os, "write", full)
    with pytest.raises(OSError, match="No space"):
        write(folder, [1], b"text")
    monkeypatch.undo()
    with pytest.raises(WriteEndedError):
        folder.write(StateHead(ROOT, [1], is_checkpoint=False), b"text", lambda: True)
    assert os.listdir(folder.path) == []


def test_a_part_goes_unless_its_writer_lives(tmp_path: Path) -> None:
    folder = opened(tmp_path)
    seen: list[list[str]] = []

    def look() -> bool:
        opened(tmp_path)
        seen.append(os.listdir(folder.path))
        return False

    (folder.path / ".left.kv.part").write_bytes(b"half")
    folder.write(StateHead(ROOT, [1], is_checkpoint=False), b"text", look)
    assert all(len(names) == 1 and ".left.kv.part" not in names for names in seen)
    assert seen and len(folder.names()) == 1


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="it has no users")
def test_a_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(tmp_path)
    monkeypatch.setattr(state_files.os, "geteuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(PermissionError):
        opened(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give folders away")
def test_folders_of_other_users_do_not_count(tmp_path: Path) -> None:
    folder = opened(tmp_path, identity="1" * 32)
    kept = folder.path / write(folder, [1], b"x" * 5000)
    os.chown(folder.path, 1, 1)
    write(opened(tmp_path, limit=1000), [1], b"text")
    assert kept.exists()


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    base, elsewhere = tmp_path / "cache", tmp_path / "elsewhere"
    base.mkdir()
    elsewhere.mkdir(mode=0o755)
    (base / IDENTITY).symlink_to(elsewhere)
    with pytest.raises(PermissionError):
        opened(base)
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755
    folder = opened(base, identity="1" * 32)
    name = write(folder, [1], b"text")
    (folder.path / name).rename(elsewhere / name)
    (folder.path / name).symlink_to(elsewhere / name)
    with pytest.raises(OSError, match=name):
        folder.head(name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="it has no pipes with names")
def test_pipes_and_folders_in_place_of_files_do_not_block(tmp_path: Path) -> None:
    folder = opened(tmp_path, limit=1000)
    names = [digit * 32 + ".kv" for digit in "01"]
    os.mkfifo(folder.path / ".left.kv.part")
    os.mkfifo(folder.path / names[0])
    (folder.path / names[1]).mkdir()
    opened(tmp_path)
    with pytest.raises(DamagedFileError):
        folder.head(names[0])
    with pytest.raises(IsADirectoryError):
        folder.head(names[1])
    for key in range(8):
        write(folder, [key], bytes(300))
    assert names[1] in folder.names()


def test_foreign_versions_are_not_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = opened(tmp_path)
    monkeypatch.setattr(state_files, "_MAGIC", b"trioKV99")
    name = write(folder, [1], b"text")
    monkeypatch.undo()
    with pytest.raises(DamagedFileError):
        folder.head(name)


@pytest.mark.system
@pytest.mark.skipif(not hasattr(os, "fork"), reason="it kills forked processes")
def test_no_kill_leaves_a_damaged_file(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.killed_writers", str(tmp_path), str(KILLS)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    n_kills, n_files, n_parts = map(int, done.stdout.split())
    assert n_kills == KILLS
    assert n_files > 0 and n_parts >= 0
