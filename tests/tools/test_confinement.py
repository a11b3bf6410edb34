"""What is taken from the commands of a server that runs as root."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from trioserve.tools.process import (
    CommandLimits,
    CommandOutput,
    CommandSandbox,
    clean_environment,
    confinement,
    run,
)

pytestmark = pytest.mark.system

_MAY_MOUNT = subprocess.run(["unshare", "--mount", "true"], capture_output=True).returncode == 0


async def command(text: str, *folders: Path) -> CommandOutput:
    sandbox = CommandSandbox.around(map(str, folders))
    return await run(
        ["sh", "-c", text],
        timeout=60,
        max_output=4096,
        env=clean_environment(sandbox),
        cwd=str(folders[0]),
        limits=CommandLimits(),
        sandbox=sandbox,
    )


@pytest.mark.skipif(not _MAY_MOUNT, reason="this user may not mount")
async def test_owners_modes_and_times_outside_stay(tmp_path: Path) -> None:
    folder, file = tmp_path / "folder", tmp_path / "file"
    folder.mkdir()
    file.write_text("text")
    before = file.stat()
    for change in ("chmod 777", "chown 5", "touch -d 2001-01-01"):
        output = await command(f"{change} {file}", folder)
        assert b"Read-only file system" in output.data
    assert file.stat() == before


async def test_inside_they_are_the_commands(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    text = f"echo a >$TMPDIR/a && cp $TMPDIR/a {second}/b && chmod 751 {second}/b && pwd"
    output = await command(text, first, second)
    assert (output.exit_code, output.data) == (0, f"{first}\n".encode())
    assert (second / "b").stat().st_mode & 0o777 == 0o751
    assert list(first.iterdir()) == []


async def test_a_folder_inside_of_another(tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    output = await command(f"touch here {tmp_path}/there", inner, tmp_path)
    assert output.exit_code == 0, output.data
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["here", "inner", "there"]


def test_without_the_rights_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not confinement.make_read_only(["/tmp"])


@pytest.mark.skipif(os.geteuid() != 0, reason="the tests do not run as root")
async def test_a_command_has_few_capabilities(tmp_path: Path) -> None:
    output = await command("grep CapEff /proc/self/status", tmp_path)
    assert int(output.data.split()[1], 16) & ~0b100_1111_1011 == 0
    output = await command("chown 5:5 . && ls -dn .", tmp_path)
    assert b" 5 5 " in output.data
