"""`write_file`."""

from __future__ import annotations

import os
import resource
import stat
from pathlib import Path

import pytest

from tests.support.file_tools import call, tool_in
from trioserve.tools.builtin.file_tools import WriteFile
from trioserve.tools.tool import ToolCallContext


async def test_a_file_is_made_with_its_directories(tmp_path: Path) -> None:
    result = await call(WriteFile, tmp_path, path="a/b/c.txt", content="é\r\n")
    assert result.answer == {"result": "file written successfully", "path": "a/b/c.txt", "bytes": 4}
    assert result.diff == "--- /dev/null\n+++ b/a/b/c.txt\n@@ -0,0 +1 @@\n+é\r\n"
    assert (tmp_path / "a/b/c.txt").read_bytes() == "é\r\n".encode()


async def test_a_file_that_is_replaced_keeps_its_mode_and_owner(tmp_path: Path) -> None:
    file = tmp_path / "a.sh"
    file.write_text("old\n")
    file.chmod(0o755)
    if os.geteuid() == 0:
        os.chown(file, 1234, 5678)
    before = file.stat()
    result = await call(WriteFile, tmp_path, path="a.sh", content="new\n")
    assert result.diff == "--- a/a.sh\n+++ b/a.sh\n@@ -1 +1 @@\n-old\n+new\n"
    after = file.stat()
    assert (after.st_mode, after.st_uid, after.st_gid) == (
        before.st_mode, before.st_uid, before.st_gid
    )  # fmt: skip
    assert file.read_text() == "new\n"
    assert os.listdir(tmp_path) == ["a.sh"]


async def test_a_new_file_has_the_mode_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    await call(WriteFile, tmp_path, path="a", content="")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "other").stat().st_mode


async def test_whoever_had_opened_the_old_file_keeps_it(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_text("old")
    with file.open() as opened:
        await call(WriteFile, tmp_path, path="a", content="new")
        assert opened.read() == "old"


async def test_where_the_owner_cannot_be_kept_the_file_is_written_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "fchown", refuse)
    file = tmp_path / "a"
    file.write_text("old and longer")
    number = file.stat().st_ino
    await call(WriteFile, tmp_path, path="a", content="new")
    assert (file.read_text(), file.stat().st_ino, os.listdir(tmp_path)) == ("new", number, ["a"])


async def test_a_link_inside_is_followed_and_stays_one(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    (tmp_path / "link").symlink_to("a")
    await call(WriteFile, tmp_path, path="link", content="new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").read_text() == "new"


async def test_another_name_of_a_file_outside_keeps_what_it_had(tmp_path: Path) -> None:
    (tmp_path / "inside").mkdir()
    (tmp_path / "outside").write_text("old")
    (tmp_path / "inside" / "hard").hardlink_to(tmp_path / "outside")
    await call(WriteFile, tmp_path / "inside", path="hard", content="new")
    assert (tmp_path / "outside").read_text() == "old"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("../outside", "--tools-dir"),
        ("link", "--tools-dir"),
        ("new/../../outside", "--tools-dir"),
        ("/etc/trioserve-test", "--tools-dir"),
        ("sub", "Is a directory"),
        (".", "Is a directory"),
        ("fifo", "Not a regular file"),
        ("file/a", "Not a directory"),
        ("x" * 300, "File name too long"),
        ("\0", "NUL"),
        ("", "Is a directory"),
    ],
)
async def test_what_cannot_be_written_is_an_error_and_nothing_changes(
    tmp_path: Path, path: str, message: str
) -> None:
    inside = tmp_path / "inside"
    (inside / "sub").mkdir(parents=True)
    (inside / "file").touch()
    (inside / "link").symlink_to("../outside")
    os.mkfifo(inside / "fifo")
    before = sorted(os.listdir(inside))
    result = await call(WriteFile, inside, path=path, content="new")
    assert message in str(result.answer["error"])
    if message != "--tools-dir" and "\0" not in path:
        assert str(result.answer["error"]).startswith(f"failed to write file: {path} (")
    assert (sorted(os.listdir(inside)), os.listdir(tmp_path)) == (before, ["inside"])
    assert stat.S_ISFIFO((inside / "fifo").stat().st_mode)


async def test_text_that_is_none_is_an_error(tmp_path: Path) -> None:
    result = await call(WriteFile, tmp_path, path="a", content="\ud800")
    assert result.answer == {"error": "content has half of a surrogate pair"}
    assert os.listdir(tmp_path) == []


async def test_a_preview_shows_the_diff_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\n")
    tool = tool_in(tmp_path, WriteFile)
    context = ToolCallContext()
    preview = await tool.preview({"path": "a", "content": "1\n3"}, context)
    assert preview == (
        "--- a/a\n+++ b/a\n@@ -1,2 +1,2 @@\n 1\n-2\n+3\n\\ No newline at end of file\n"
    )
    assert (tmp_path / "a").read_text() == "1\n2\n"
    for arguments in ({"path": "/etc/x", "content": ""}, {"path": "."}, {}):
        assert await tool.preview(arguments, context) is None


async def test_of_what_is_not_text_the_preview_says_so(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"\0")
    preview = await tool_in(tmp_path, WriteFile).preview(
        {"path": "a", "content": "text"}, ToolCallContext()
    )
    assert preview == "Files a/a and b/a differ\n"


async def test_where_there_is_no_room_the_old_file_stays(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("old")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
    try:
        result = await call(WriteFile, tmp_path, path="a", content="x" * 2**21)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.answer == {"error": "failed to write file: a (File too large)"}
    assert ((tmp_path / "a").read_text(), os.listdir(tmp_path)) == ("old", ["a"])


async def test_names_that_are_not_unicode_are_written_and_shown(tmp_path: Path) -> None:
    result = await call(WriteFile, tmp_path, path="\udcff", content="new")
    assert result.answer["path"] == "\ufffd"
    assert os.listdir(bytes(tmp_path)) == [b"\xff"]
    result = await call(WriteFile, tmp_path, path="a\n+++ b/etc\u202e", content="new")
    assert result.diff is not None
    assert result.diff.startswith("--- /dev/null\n+++ b/a\ufffd+++ b/etc\ufffd\n@@")
