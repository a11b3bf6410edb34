"""Commands of a server that runs as root, or as another user, have few rights."""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.fences import USERS, as_user
from tests.support.processes import with_variable
from trioserve.tools.process import (
    CommandLimits,
    CommandOutput,
    CommandSandbox,
    clean_environment,
    confinement,
    has_landlock,
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
ADD_KEY, BPF, IOPRIO_SET = (248, 321, 251) if os.uname().machine == "x86_64" else (217, 280, 30)
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
    lambda: libc.inotify_add_watch(libc.inotify_init(), b"/usr", 2),
    lambda: libc.unshare(0x20000),
    lambda: libc.syscall(ADD_KEY, b"user", b"a", b"a", 1, -3),
    lambda: libc.syscall(BPF, 0, None, 0),
    lambda: libc.syscall(IOPRIO_SET, 1, 0, 0),
    lambda: os.setxattr("file", "user.a", b"a"),
    lambda: resource.prlimit(server, resource.RLIMIT_CPU),
    lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (50, 50)),
)))
"""


@pytest.fixture(params=USERS)
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of a user that commands run as: each of `USERS`."""
    with as_user(request.param, monkeypatch) as folder:
        inside = folder / "inside"
        inside.mkdir(mode=0o777)
        inside.chmod(0o777)
        yield inside


async def is_apart(folder: Path) -> bool:
    """Commands have namespaces here."""
    output = await command("readlink /proc/self/ns/pid", folder)
    return output.text.strip() != os.readlink("/proc/self/ns/pid")


@pytest.mark.skipif(os.uname().machine not in confinement._MACHINES, reason="no filter is known")
async def test_system_calls_that_reach_beyond_the_command_are_refused(folder: Path) -> None:
    (folder / "file").touch()
    (folder / "file").chmod(0o666)
    (folder / "calls.py").write_text(CALLS)
    output = await command(f"/usr/bin/python3 calls.py {os.getpid()}", folder)
    refused = [1] * 7 + [38] + [1] * 6 + [95]
    found = list(map(int, output.data.split()))
    assert found[: len(refused)] == refused
    # To ask for limits is allowed; in a namespace there is no such process.
    assert found[len(refused) :] in ([0, 0], [1, 0], [3, 0])


REACHES = """
import ctypes, os, sys
server, number = map(int, sys.argv[1:])
call = ctypes.CDLL(None).syscall
def reaches(attempt):
    try:
        return attempt() >= 0
    except OSError:
        return False
PTRACE = 101 if os.uname().machine == "x86_64" else 117
print(*sorted(set(os.listdir("/proc/self/fd")) & {*map(str, range(3, 100))} - {"3"}), *(
    reaches(attempt) for attempt in (
        lambda: call(438, os.pidfd_open(server), number, 0),  # pidfd_getfd
        lambda: call(PTRACE, 0x4206, server, 0, 0),  # PTRACE_SEIZE
        lambda: os.open(f"/proc/{server}/mem", os.O_RDWR),
        lambda: os.open(f"/proc/{server}/fd/{number}", os.O_RDWR),
    )
))
"""


@pytest.mark.skipif(not has_landlock(), reason="the kernel has no Landlock")
async def test_a_command_reaches_no_socket_of_the_server(folder: Path) -> None:
    (folder / "reaches.py").write_text(REACHES)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = f"/usr/bin/python3 reaches.py {os.getpid()} {ours.fileno()}"
        output = await command(words, folder)
    assert output.text.split() == ["False"] * 4, output


@pytest.mark.skipif(not _MAY_MOUNT, reason="this user may have no namespaces")
async def test_a_command_sees_its_own_processes_only(folder: Path) -> None:
    if not await is_apart(folder):
        return  # as root without CAP_SYS_ADMIN: see docs/security.md
    output = await command("echo /proc/[0-9]*; kill -9 1; ls /dev/mqueue; echo $$ $PPID", folder)
    assert output.text.splitlines()[0].split()[:2] == ["/proc/1", "/proc/2"]
    assert output.text.splitlines()[-1] == "2 1"
    assert len(output.text.splitlines()[0].split()) == 2
    # The end of the first process is that of all, and of the pipe that they hold.
    output = await command("setsid sleep 1000 & kill -TERM $$; sleep 9", folder)
    assert output.exit_code == 128 + 15


async def test_which_users_have_namespaces(monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() or not _MAY_MOUNT:
        pytest.skip("needs a root that may mount")
    for user, expected in (("same", True), ("root without CAP_SYS_ADMIN", False),
                           ("ordinary in a container", False)):  # fmt: skip
        with as_user(user, monkeypatch) as folder:
            assert await is_apart(folder) is expected


async def test_processes_that_start_others_all_the_time_are_ended(folder: Path) -> None:
    value = f"{time.monotonic_ns()}"
    restless = f"""export RESTLESS={value} R='(setsid sh -c "$R" &)'
        for i in 1 2 3 4; do sh -c "$R"; done; sleep 0.2"""
    await command(restless, folder)
    assert with_variable("RESTLESS", value) == []


async def test_a_command_that_exits_by_itself_has_its_status(folder: Path) -> None:
    assert (await command("exit 3", folder)).exit_code == 3
    assert (await command("kill -9 $$", folder)).exit_code == 128 + 9
    assert (await command("nosuchprogram", folder)).exit_code == 127
    assert (await command("whoami >/dev/null; id -u; touch a && cat a", folder)).exit_code == 0
    assert list(folder.parent.iterdir()) == [folder]


async def test_an_ordinary_user_cannot_change_modes_outside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with as_user("ordinary", monkeypatch) as folder:
        inside = folder / "inside"
        inside.mkdir()
        inside.chmod(0o777)
        if not await is_apart(inside):
            pytest.skip("this user may have no namespaces")
        outside = folder / "outside"
        outside.touch()
        os.chown(outside, 31234, 31234)
        output = await command(f"chmod 777 {outside}", inside)
        assert b"Read-only file system" in output.data


async def test_programs_work_without_them(tmp_path: Path) -> None:
    text = (
        "echo a >a && cp -a a b && mv b c && python3 -c 'import threading; "
        'threading.Thread(target=print, args=("thread",)).start()\' && (echo x | cat) & wait'
    )
    output = await command(text, tmp_path)
    assert (output.exit_code, output.data) == (0, b"thread\nx\n")


def test_a_machine_without_known_numbers_has_no_filter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(confinement, "_MACHINES", {})
    assert not confinement.filter_calls(is_apart=False)
    assert confinement.fork_apart() == -1
