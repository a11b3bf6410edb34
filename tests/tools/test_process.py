"""Programs that end with the block."""

from __future__ import annotations

import signal
import time

import pytest

from tests.support.processes import is_alive
from trioserve.errors import ToolRuntimeError
from trioserve.tools.process import clean_environment, open_process

pytestmark = pytest.mark.system

ENV = clean_environment()


async def test_a_program_reads_and_writes() -> None:
    async with open_process(["cat"], env=ENV) as process:
        assert process.stdin is not None
        await process.stdin.send_all(b"hello")
        await process.stdin.aclose()
        assert await process.stdout.receive_some() == b"hello"
        assert await process.wait() == 0
        assert await process.wait() == 0


async def test_standard_error_has_a_pipe_of_its_own() -> None:
    async with open_process(["sh", "-c", "echo out; echo err >&2"], env=ENV) as process:
        assert process.stderr is not None
        assert await process.wait() == 0
        assert await process.stdout.receive_some() == b"out\n"
        assert await process.stderr.receive_some() == b"err\n"


@pytest.mark.parametrize(
    ("argv", "cwd", "reason"),
    [
        (["no-such-program"], None, "No such file"),
        (["/etc/passwd"], None, "Permission denied"),
        (["true"], "/no/such/folder", "No such file"),
        (["true", "\0"], None, "embedded null byte"),
    ],
)
async def test_what_cannot_be_started_is_an_error(
    argv: list[str], cwd: str | None, reason: str
) -> None:
    with pytest.raises(ToolRuntimeError, match=reason):
        async with open_process(argv, env=ENV, cwd=cwd):
            pytest.fail("it was started")


async def test_an_exit_code_and_a_signal_are_told() -> None:
    async with open_process(["sh", "-c", "exit 3"], env=ENV) as process:
        assert await process.wait() == 3
    async with open_process(["sh", "-c", "kill -TERM $$"], env=ENV) as process:
        assert await process.wait() == -signal.SIGTERM


ESCAPES = {
    "child": "sleep 1000 & echo $!; wait",
    "nohup": "nohup sleep 1000 >/dev/null 2>&1 & echo $!; wait",
    "session": "setsid sleep 1000 & echo $!; wait",
    "double fork": "(setsid sh -c 'setsid sleep 1000 & echo $!' &) ; sleep 1000",
    "orphan": "(sleep 1000 & echo $!) ; sleep 1000",
    "deaf": "trap '' TERM INT HUP; sleep 1000 & echo $!; wait",
}


@pytest.mark.parametrize("command", ESCAPES.values(), ids=ESCAPES)
async def test_nothing_is_left_after_the_block(command: str) -> None:
    async with open_process(["sh", "-c", command], env=ENV) as process:
        pid = int(await process.stdout.receive_some())
        assert is_alive(pid)
        before = time.perf_counter()
    assert time.perf_counter() - before < 20  # here it is a few milliseconds
    assert not is_alive(pid)
    assert not is_alive(process.pid)
