"""Programs: their input and output, how they end, and that they end with the block."""

from __future__ import annotations

import time
from typing import Any

import pytest

from tests.support.processes import is_alive
from trioserve.errors import ToolRuntimeError
from trioserve.tools.process import (
    CommandLimits,
    CommandOutput,
    clean_environment,
    open_process,
    run,
)

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


# -- with `run`


async def run_sh(command: str, **options: Any) -> CommandOutput:
    options = {"timeout": 20, "max_output": 1000, "limits": CommandLimits()} | options
    return await run(["sh", "-c", command], env=ENV, **options)


async def test_both_outputs_come_together_and_piece_by_piece() -> None:
    pieces: list[str] = []
    output = await run_sh("echo one; echo two >&2; exit 5", on_output=pieces.append)
    assert output.text == "".join(pieces) == "one\ntwo\n"
    assert (output.exit_code, output.timed_out, output.truncated) == (5, False, False)


async def test_standard_error_can_be_kept_apart() -> None:
    output = await run_sh("echo one; echo two >&2", merged=False)
    assert (output.data, output.errors) == (b"one\n", b"two\n")


async def test_a_program_reads_what_it_is_given() -> None:
    text = b"x" * 300_000
    assert (await run_sh("wc -c", stdin=text)).text.strip() == "300000"
    assert (await run_sh("true", stdin=text)).exit_code == 0  # though it does not read
    assert (await run_sh("cat")).data == b""


async def test_a_program_ends_at_its_time() -> None:
    output = await run_sh("echo begun; sleep 1000", timeout=0.3)
    assert output.timed_out
    assert output.text == "begun\n"
    assert output.exit_code == 128 + 9
    assert (await run_sh("kill -TERM $$")).exit_code == 128 + 15


async def test_output_is_cut_at_the_limit_between_characters() -> None:
    pieces: list[str] = []
    output = await run_sh("printf 'äöü'", max_output=3, on_output=pieces.append)
    assert output.truncated
    assert output.text == "".join(pieces) == "ä"
    assert (await run_sh("printf 'ä\\303'")).text == "ä�"
