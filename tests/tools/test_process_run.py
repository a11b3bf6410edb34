"""What a program writes, and how it ends."""

from __future__ import annotations

from typing import Any

import pytest

from trioserve.tools.process import CommandLimits, CommandOutput, clean_environment, run

pytestmark = pytest.mark.system

ENV = clean_environment()


async def run_sh(command: str, **options: Any) -> CommandOutput:
    options = {"timeout": 20, "max_output": 1000, "limits": CommandLimits()} | options
    return await run(["sh", "-c", command], env=ENV, **options)


async def test_both_outputs_come_together_and_piece_by_piece() -> None:
    pieces: list[str] = []
    output = await run_sh("echo one; echo two >&2; exit 5", on_output=pieces.append)
    assert output.text == "one\ntwo\n"
    assert "".join(pieces) == output.text
    assert output.exit_code == 5
    assert not output.timed_out
    assert not output.truncated


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


async def test_the_end_of_a_signal_is_told_as_a_shell_does() -> None:
    assert (await run_sh("kill -TERM $$")).exit_code == 128 + 15


async def test_output_is_cut_at_the_limit_between_characters() -> None:
    pieces: list[str] = []
    output = await run_sh("printf 'äöü'", max_output=3, on_output=pieces.append)
    assert output.truncated
    assert output.text == "".join(pieces) == "ä"
    assert (await run_sh("printf 'ä\\303'")).text == "ä�"
