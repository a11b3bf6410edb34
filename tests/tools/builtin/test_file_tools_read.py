"""`read_file`."""

from __future__ import annotations

import base64
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.file_tools import call
from trioserve.errors import InvalidRequestError
from trioserve.tools.builtin import file_tools
from trioserve.tools.builtin.file_tools import ReadFile

TOO_LARGE = 16 * 1024 + 1


async def read(folder: Path, path: str, **arguments: Any) -> str:
    result = await call(ReadFile, folder, path=path, **arguments)
    return result.text


async def error_of(folder: Path, path: str, **arguments: Any) -> str:
    result = await call(ReadFile, folder, path=path, **arguments)
    assert result.is_error
    return str(result.answer["error"])


async def test_lines_are_read_and_numbered(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\r\ntwo\nthr\xffee")
    assert await read(tmp_path, "a") == "one\r\ntwo\nthr�ee\n"
    assert await read(tmp_path, "a", start_line=2, end_line=2, append_loc=True) == "2→two\n"
    assert await read(tmp_path, "a", start_line="3") == "thr�ee\n"
    assert await read(tmp_path, "a", start_line=4) == ""


async def test_a_large_file_is_read_in_parts(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"0123456789abcde\n" * 2000)
    assert await error_of(tmp_path, "a") == (
        "file too large (32000 bytes, max 16384). Use start_line/end_line to read a portion."
    )
    assert await read(tmp_path, "a", start_line=1999) == "0123456789abcde\n" * 2
    assert await read(tmp_path, "a", end_line=-1, start_line=2) == (
        "0123456789abcde\n" * 1024 + "[output truncated]"
    )


async def test_of_one_long_line_there_is_the_beginning(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("first\n" + "é" * TOO_LARGE + "\nlast\n")
    text = await read(tmp_path, "a", start_line=2)
    assert text == "é" * 8192 + "\n[output truncated]"
    assert await read(tmp_path, "a", start_line=3) == "last\n"


async def test_a_sparse_file_of_a_terabyte_takes_neither_time_nor_memory(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("text\n" * 4000)
    os.truncate(tmp_path / "a", 2**40)
    assert (await read(tmp_path, "a", end_line=2)) == "text\ntext\n"
    result = await call(ReadFile, tmp_path, response_type="base64", path="a")
    assert result.answer["error"] == f"file too large ({2**40} bytes, max 33554432)"


async def test_a_line_that_is_too_far_away_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").write_text("text\n" * 10_000)
    assert await read(tmp_path, "a", start_line=9_999) == "text\n" * 2
    monkeypatch.setattr(file_tools, "_MAX_READ_SECONDS", -1.0)
    assert await error_of(tmp_path, "a", start_line=9_999) == (
        "it takes too long to get to line 9999"
    )


async def test_bytes_come_as_base64_only_where_the_client_asks(tmp_path: Path) -> None:
    data = bytes(range(256)) * 100
    (tmp_path / "a").write_bytes(data)
    result = await call(ReadFile, tmp_path, response_type="base64", path="a")
    assert result.answer["size_bytes"] == len(data)
    assert base64.b64decode(result.answer["base64"]) == data
    assert await error_of(tmp_path, "a", start_line=2) == "file is binary, and not text: a"


async def test_what_cannot_be_read_is_an_error_for_the_model(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    assert await error_of(tmp_path, "fifo") == "failed to open file: fifo (Not a regular file)"
    assert await error_of(tmp_path, ".") == "failed to open file: . (Is a directory)"
    assert await error_of(tmp_path, "none") == "cannot stat file: none"
    assert "--tools-dir" in await error_of(tmp_path, "/etc/passwd")


async def test_a_file_without_a_size_is_read(tmp_path: Path) -> None:
    assert "Linux" in await read(Path("/"), "/proc/version")


async def test_names_that_are_not_unicode_are_read(tmp_path: Path) -> None:
    Path(os.fsdecode(bytes(tmp_path) + b"/\xff")).write_text("odd")
    assert await read(tmp_path, "\udcff") == "odd\n"


@pytest.mark.parametrize(
    ("arguments", "param"),
    [({}, "path"), ({"path": 1}, "path"), ({"path": "a", "end_line": {}}, "end_line")],
)
async def test_arguments_that_make_no_sense_are_named(
    tmp_path: Path, arguments: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        await call(ReadFile, tmp_path, **arguments)
    assert caught.value.param == param
