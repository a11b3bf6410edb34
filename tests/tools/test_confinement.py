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


CALLS = """
import ctypes, os, resource, sys
libc = ctypes.CDLL(None, use_errno=True)
def error(call):
    ctypes.set_errno(0)
    try:
        result = call()
    except OSError as failure:
        return failure.errno
    return ctypes.get_errno() if result == -1 else 0
server = int(sys.argv[1])
print(*(error(call) for call in (
    lambda: resource.prlimit(server, resource.RLIMIT_CPU, (1, 1)),
    lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3)),
    lambda: os.memfd_create("a"),
    lambda: libc.shmget(0, 4096, 0o1600),
    lambda: libc.semget(0, 1, 0o1600),
    lambda: libc.msgget(0, 0o1600),
    lambda: libc.unshare(0x10000000),
    lambda: libc.syscall(435, None, 0),  # clone3
    lambda: libc.syscall(425, 1, None),  # io_uring_setup
    lambda: os.setxattr("file", "user.a", b"a"),
    lambda: resource.prlimit(server, resource.RLIMIT_CPU),
    lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50)),
)))
"""


@pytest.mark.skipif(os.uname().machine not in confinement._MACHINES, reason="no filter is known")
async def test_system_calls_that_reach_beyond_the_command_are_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "calls.py").write_text(CALLS)
    output = await command(f"python3 calls.py {os.getpid()}", tmp_path)
    assert list(map(int, output.data.split())) == [1, 1, 1, 1, 1, 1, 1, 38, 1, 95, 0, 0]


async def test_programs_work_without_them(tmp_path: Path) -> None:
    text = (
        "echo a >a && cp -a a b && mv b c && python3 -c 'import threading; "
        'threading.Thread(target=print, args=("thread",)).start()\' && (echo x | cat) & wait'
    )
    output = await command(text, tmp_path)
    assert (output.exit_code, output.data) == (0, b"thread\nx\n")


def test_a_machine_without_known_numbers_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "_MACHINES", {})
    assert not confinement.filter_calls()
