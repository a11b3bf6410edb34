"""`trioserve bench`: its arguments, and the whole command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.support.http_server import serving_script
from tests.support.processes import all_processes, parent_of
from tests.support.waiting import patiently, until
from trioserve.cli.commands import COMMANDS
from trioserve.cli.commands.bench import servers_of
from trioserve.cli.main import main
from trioserve.cli.options import Arguments, arguments
from trioserve.config.parse import parse
from trioserve.errors import ConfigError
from trioserve.testing import ScriptedBackend


def bench(*argv: str) -> Arguments:
    return arguments("bench", COMMANDS["bench"], argv, {})


def test_flags_of_the_command_and_of_the_server_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "x.json"
    words = ["-p", "64,128", "-np", "4", "-ntg=32", "--n-depth", "0,512", "-npl", "1,8", "-m", "m"]
    given = bench(*words, "-r", "2", "-o", "csv", "--json", str(file))
    assert given.flags == ("-np", "4", "-m", "m")
    assert given.options == {
        "n_prompt": (64, 128), "n_gen": (32,), "n_depth": (0, 512), "clients": (1, 8),
        "repetitions": 2, "output": "csv", "json": file, "svg": None, "url": None, "against": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        (["-p", "many"], "-p takes whole numbers with commas between them, not 'many'"),
        (["-npl", "0"], "-npl must be between 1 and"),
        (["-r", "1,2"], "-r takes one whole number, not '1,2'"),
        (["-o", "sql"], "-o must be one of md, csv, json, jsonl"),
        (["-p", "0", "-n", "0"], "bench has nothing to measure"),
        (["--svg", "/nowhere/x.svg"], "--svg: /nowhere/x.svg cannot be written"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_arguments(
    argv: Sequence[str], problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *argv]) == 2
    assert problem in capsys.readouterr().err


async def test_servers_at_addresses_are_measured() -> None:
    config = parse([], {}).config
    async with serving_script() as (url, _), serving_script() as (other, _):
        async with servers_of(bench("--url", url, "--against", other), config) as servers:
            assert [server.name for server in servers] == [
                one.removeprefix("http://") for one in (url, other)
            ]
            assert servers[0].seed != servers[1].seed  # the same server would have both prompts
            assert servers[0].per_word > 1
        with pytest.raises(ConfigError, match="the same server"):
            async with servers_of(bench("--url", url, "--against", url), config):
                raise AssertionError


def command(*argv: str) -> list[str]:
    return [sys.executable, "-m", "trioserve", "bench", *argv]


async def run(*argv: str) -> subprocess.CompletedProcess[str]:
    call = partial(subprocess.run, capture_output=True, text=True, check=False)
    with patiently():
        return await trio.to_thread.run_sync(partial(call, command(*argv)), abandon_on_cancel=True)


@pytest.mark.system
async def test_the_bundled_model_beside_another_server(tmp_path: Path) -> None:
    files = tmp_path / "x.json", tmp_path / "x.svg"
    lengths = ["-p", "32", "-n", "8", "-d", "0,64", "-npl", "1,2", "-r", "2", "--threads", "1"]
    backend = ScriptedBackend(lambda prompt: "x" * 100, n_slots=2, n_ctx=4096)
    async with serving_script(backend) as (url, _):
        done = await run(
            *lengths, "--against", url, "--json", str(files[0]), "--svg", str(files[1])
        )
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert len(lines) == 4 + 2 * 8
    whole = json.loads(files[0].read_text())
    other = url.removeprefix("http://")
    assert whole["models"] == {"trioserve": "bundled.gguf", other: "scripted"}
    assert lines[0] == f"trioserve: bundled.gguf; {other}: scripted"
    results = whole["results"]
    assert [(one["test"], one["clients"]) for one in results[4:6]] == [
        ("pp32 @ d64", 1), ("tg8 @ d64", 1),
    ]  # fmt: skip
    for result in results:
        ours, theirs = result["records"]
        assert ours["server"] == "trioserve"
        assert ours["tokens_per_s"] > 0
        assert ours["ratio"] > 0 and theirs["ratio"] is None
    assert ET.fromstring(files[1].read_text()).tag.endswith("svg")


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_it_and_its_server(tmp_path: Path, number: signal.Signals) -> None:
    file = tmp_path / "x.json"
    many = ",".join(map(str, range(16, 1000)))
    argv = command("-p", many, "-n", "0", "-r", "1", "--threads", "1", "--json", str(file))
    process = await trio.lowlevel.open_process(argv, stdout=subprocess.PIPE)
    assert process.stdout is not None
    with patiently():
        output = b""
        while output.count(b"\n") < 6:  # the first results are there
            output += (received := await process.stdout.receive_some())
            assert received, "it has ended"
        children = [one for one in all_processes() if parent_of(one) == process.pid]
        assert children
        process.send_signal(number)
        assert await process.wait() == 128 + number
        await process.stdout.aclose()
    await until(lambda: not set(children) & set(all_processes()))
    assert len(json.loads(file.read_text())["results"]) >= 2


@pytest.mark.system
async def test_a_model_that_does_not_exist() -> None:
    done = await run("-m", "/nowhere/x.gguf")
    assert (done.returncode, done.stdout) == (1, "")
    assert "/nowhere/x.gguf" in done.stderr
    assert os.linesep not in done.stderr.rstrip()
