"""Commands that want more than they may have, under each user that a server may run as."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from tests.support.fences import USERS, as_user
from tests.support.processes import with_variable
from tests.support.waiting import patiently, until
from trioserve.tools.process import (
    CommandLimits,
    CommandOutput,
    CommandSandbox,
    clean_environment,
    run,
)
from trioserve.tools.runtime import removing_folders

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the means"),
]

#: Files that a command leaves. With a million, removing them takes longer than a call waits.
N_NAMES = int(os.environ.get("HOSTILE_NAMES", "20000"))


@pytest.fixture(params=USERS)
def folder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with as_user(request.param, monkeypatch) as folder:
        inside = folder / "inside"
        inside.mkdir()
        inside.chmod(0o777)
        yield inside


async def python(code: str, folder: Path, **limits: int) -> CommandOutput:
    """Run a program in Python; `mark` in the environment finds what it leaves."""
    sandbox = CommandSandbox.around([str(folder)])
    (folder / "program.py").write_text(code)
    with patiently():
        return await run(
            ["/usr/bin/python3", "program.py"],
            timeout=60,
            max_output=4096,
            env={**clean_environment(sandbox), "MARK": folder.parent.name},
            cwd=str(folder),
            limits=CommandLimits(**limits),
            sandbox=sandbox,
        )


def assert_nothing_left(folder: Path) -> None:
    assert with_variable("MARK", folder.parent.name) == []
    assert os.listdir(folder.parent) == ["inside"]


HIDDEN = {
    "pipes": "for _ in range(300): one = os.pipe(); kept.append(one); fill(one[1])",
    "sockets": "for _ in range(400): one = socket.socketpair(); kept.append(one); fill(one[0])",
    "datagrams": """
for _ in range(400):
    one = socket.socketpair(type=socket.SOCK_DGRAM)
    kept.append(one)
    fill(one[0])""",
    "connections": """
listening = socket.create_server(("127.0.0.1", 0), backlog=300)
for _ in range(200):
    one = socket.create_connection(listening.getsockname())
    kept.append(one)
    fill(one)""",
    "memory of forks": """
for _ in range(20):
    if not os.fork():
        kept.append(b"x" * 9_000_000)
        time.sleep(50)""",
    "shared memory": """
import mmap
for _ in range(20):
    one = mmap.mmap(-1, 9_000_000)
    one.write(b"x" * 9_000_000)
    kept.append(one)""",
}
PRELUDE = """
import fcntl, os, socket, time
kept = []
def fill(one):
    number = one if isinstance(one, int) else one.fileno()
    os.set_blocking(number, False)
    try:
        fcntl.fcntl(number, 1031, 2**20)
    except OSError:
        pass
    try:
        while os.write(number, bytes(16384)):
            pass
    except OSError:
        pass
"""


@pytest.mark.parametrize("kind", HIDDEN)
async def test_memory_that_no_process_maps_counts(kind: str, folder: Path) -> None:
    output = await python(f"{PRELUDE}{HIDDEN[kind]}\ntime.sleep(50)", folder, memory=60_000_000)
    assert output.limit_reached == "memory", output.text
    assert_nothing_left(folder)


async def test_fifty_that_fork_all_the_time(folder: Path) -> None:
    code = """
import os, time
for _ in range(50):
    if not os.fork():
        while True:
            if os.fork():
                os._exit(0)
            os.setsid()
time.sleep(1)
"""
    await python(code, folder)
    assert_nothing_left(folder)


async def test_processes_that_take_no_signal(folder: Path) -> None:
    code = f"""
import os, signal, time
for number in range(1, 65):
    try:
        signal.signal(number, signal.SIG_IGN)
    except (OSError, ValueError):
        pass
for _ in range(30):
    if not os.fork():
        os.setsid()
        os.kill(os.getpid(), {signal.SIGSTOP})
        time.sleep(1000)
"""
    await python(code, folder)
    assert_nothing_left(folder)


async def test_limits_of_the_server_and_of_the_supervisor_stay(folder: Path) -> None:
    code = f"""
import os, resource
for pid in ({os.getpid()}, os.getppid(), 1):
    for limit in (resource.RLIMIT_CPU, resource.RLIMIT_NOFILE):
        try:
            resource.prlimit(pid, limit, (1, 1))
        except OSError as error:
            print(error.errno)
"""
    output = await python(code, folder)
    assert set(output.text.split()) <= {"1", "3"} and len(output.text.split()) == 6


async def test_a_folder_with_many_names_is_removed(folder: Path) -> None:
    code = f"""
import os
os.mkdir(os.environ["TMPDIR"] + "/many")
os.chdir(os.environ["TMPDIR"] + "/many")
for number in range({N_NAMES}):
    os.mknod(str(number))
"""
    output = await python(code, folder)
    assert output.exit_code == 0
    for left in folder.parent.glob("trioserve-tool-*"):
        owner = left.stat().st_uid
        with mock.patch.object(os, "geteuid", return_value=owner):
            async with removing_folders():
                await until(lambda: os.listdir(folder.parent) == ["inside"])
    assert_nothing_left(folder)
