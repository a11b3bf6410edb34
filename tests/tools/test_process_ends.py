"""Nothing is left of a program, however it ends, and however this process ends."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import trio

from tests.support import waiting
from tests.support.fences import without_time
from tests.support.processes import running, with_variable
from tests.support.waiting import PATIENCE, patiently
from trioserve.errors import ToolRuntimeError
from trioserve.tools.process import CommandLimits, clean_environment, open_process, run
from trioserve.tools.runtime import removing_folders

pytestmark = pytest.mark.system

ENV = clean_environment()

#: Runs; most are cancelled. 500 take 15 seconds.
N_RUNS = int(os.environ.get("TRIOSERVE_TEST_RUNS", "60"))

LEAVES_MANY = """
setsid sleep 1000 &
nohup sleep 1000 >/dev/null 2>&1 &
(setsid sh -c 'sleep 1000 & sleep 1000' &)
echo $$ $!
touch $TMPDIR/file
wait
"""

SERVER = """
import sys, trio
from trioserve.tools.process import CommandLimits, clean_environment, open_process

async def main():
    env = clean_environment()
    async with open_process(["sh", "-c", sys.argv[1]], env=env, limits=CommandLimits()) as process:
        await trio.sleep_forever()

trio.run(main)
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def with_folder(folder: str) -> list[int]:
    """The processes whose folder for temporary files is there."""
    return with_variable("TMPDIR", f"{folder}/")


def until(condition: Callable[[], bool], seconds: float = PATIENCE) -> float:
    """Wait for something that another process does. Returns how long it took."""
    begin = time.perf_counter()
    while not condition():
        assert time.perf_counter() - begin < seconds
        time.sleep(0.001)
    return time.perf_counter() - begin


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_all_ends_when_this_process_is_killed(tmp_path: Path, number: signal.Signals) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVER, LEAVES_MANY],
        env={**os.environ, "TMPDIR": str(tmp_path)},
    ) as server:  # fmt: skip
        try:
            until(lambda: len(with_folder(str(tmp_path))) == 6)
        finally:
            server.send_signal(number)
        until(lambda: not with_folder(str(tmp_path)))
        until(lambda: not list(tmp_path.iterdir()))


async def test_a_cancel_ends_all_at_once(temporary: Path) -> None:
    async with open_process(["sh", "-c", LEAVES_MANY], env=ENV, limits=CommandLimits()):
        until(lambda: len(with_folder(str(temporary))) == 6)
        with trio.CancelScope() as scope:
            scope.cancel()
            await trio.sleep_forever()
    assert with_folder(str(temporary)) == []
    assert list(temporary.iterdir()) == []


async def test_a_command_that_kills_its_supervisor_ends(temporary: Path) -> None:
    command = "(sleep 1000 &); setsid sleep 0.1 & kill -9 $PPID; sleep 1000"
    with patiently(), suppress(ToolRuntimeError):  # it may end before it has reported the start
        output = await run(["sh", "-c", command], timeout=20, max_output=10, env=ENV)
        assert output.exit_code == 128 + 9
    until(lambda: not with_folder(str(temporary)))


async def test_a_supervisor_without_descriptors_ends_all(temporary: Path) -> None:
    """It cannot list processes then, and must not conclude that all have ended."""
    code = "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (3, 3))"
    command = f"setsid sleep 1000 & exec python3 -c '{code}; import time; time.sleep(1000)'"
    with patiently():
        await run(["sh", "-c", command], timeout=20, max_output=10, env=ENV, limits=CommandLimits())
    assert with_folder(str(temporary)) == []


async def test_a_last_command_is_run(tmp_path: Path) -> None:
    last = ["touch", str(tmp_path / "bye")]
    async with open_process(["sleep", "1000"], env=ENV, last=last):
        assert not (tmp_path / "bye").exists()
    assert (tmp_path / "bye").exists()
    async with open_process(["true"], env=ENV, last=["no-such-program"]) as process:
        assert await process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
async def test_a_supervisor_that_is_told_to_end_ends_the_program(number: signal.Signals) -> None:
    async with open_process(["sh", "-c", "echo $PPID; sleep 1000"], env=ENV) as process:
        os.kill(int(await process.stdout.receive_some()), number)
        with patiently():
            assert await process.wait() == -signal.SIGKILL


async def test_what_is_left_running_ends_with_the_command(temporary: Path) -> None:
    with patiently():
        output = await run(["sh", "-c", f"({LEAVES_MANY}) & sleep 0.1"], timeout=20,
                           max_output=1000, env=ENV, limits=CommandLimits())  # fmt: skip
    assert output.exit_code == 0
    assert with_folder(str(temporary)) == []


async def test_a_folder_that_may_not_be_changed_is_removed(temporary: Path) -> None:
    command = "mkdir -p $TMPDIR/a/b/c; touch $TMPDIR/a/b/x; chmod -R 0 $TMPDIR/a"
    await run(["sh", "-c", command], timeout=20, max_output=10, env=ENV, limits=CommandLimits())
    assert list(temporary.iterdir()) == []


async def test_the_removal_of_a_folder_ends_in_time(
    temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_time(monkeypatch)
    await run(["sh", "-c", "touch $TMPDIR/file"], timeout=20, max_output=10, env=ENV,
              limits=CommandLimits())  # fmt: skip
    (left,) = temporary.glob("trioserve-tool-*")
    assert (left / "file").exists()
    assert running(str(left)) == []


async def test_a_folder_that_is_used_is_not_removed(temporary: Path) -> None:
    (temporary / "trioserve-tool-left").mkdir()
    command = ["sh", "-c", "echo $TMPDIR; cat"]
    async with open_process(command, env=ENV, limits=CommandLimits()) as process:
        used = Path((await process.stdout.receive_some()).decode().strip())
        async with removing_folders():
            await waiting.until(lambda: list(temporary.iterdir()) == [used])


async def test_a_program_that_cannot_be_started_leaves_no_folder(temporary: Path) -> None:
    with pytest.raises(ToolRuntimeError):
        await run(["no-such-program"], timeout=20, max_output=10, env=ENV, limits=CommandLimits())
    assert list(temporary.iterdir()) == []


async def test_runs_and_cancels_leave_nothing(temporary: Path) -> None:
    commands = [
        "true", "sleep 1000", "echo x; exec sleep 1000", "setsid sleep 1000 & wait", "yes",
        "(setsid sleep 1000 &) ; sleep 1000", "touch $TMPDIR/x; sleep 1000", "no-such-program",
        "trap '' TERM; sleep 1000", "exec >&- 2>&-; sleep 1000", "kill -9 $$",
    ]  # fmt: skip
    dice = random.Random(17)
    await run(["true"], timeout=20, max_output=10, env=ENV, limits=CommandLimits())
    before = what_there_is()

    async def run_some(n: int) -> None:
        for _ in range(n):
            with trio.move_on_after(dice.random() * 0.08):
                await run(["sh", "-c", dice.choice(commands)], timeout=dice.random() * 0.08,
                          max_output=100, env=ENV, limits=CommandLimits())  # fmt: skip

    async with trio.open_nursery() as nursery:
        for _ in range(6):
            nursery.start_soon(run_some, N_RUNS // 6)
    assert with_folder(str(temporary)) == []
    assert list(temporary.iterdir()) == []
    assert what_there_is() == before


def what_there_is() -> tuple[int, int, str]:
    """Descriptors, threads but for those that Trio keeps for a while, and children."""
    threads = [one for one in threading.enumerate() if not one.name.startswith("Trio")]
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    return len(os.listdir("/proc/self/fd")), len(threads), children
