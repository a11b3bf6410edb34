"""`exec_shell_command` and `get_info`, on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from trioserve.config import Config
from trioserve.errors import InvalidRequestError, ToolRuntimeError
from trioserve.tools.registry import ToolRegistry, open_registry
from trioserve.tools.tool import ToolCallContext, ToolResult

pytestmark = pytest.mark.system


@pytest.fixture
async def box(tmp_path: Path) -> AsyncIterator[ToolRegistry]:
    config = Config(model="m.gguf", tools=("all",), tools_dir=(str(tmp_path),))
    async with open_registry(config) as opened:
        yield opened


async def shell(box: ToolRegistry, command: str, **arguments: Any) -> ToolResult:
    tool = box.find("exec_shell_command", streams=True)
    return await tool.call({"command": command, **arguments}, ToolCallContext())


async def test_what_a_command_writes_comes_with_its_exit_code(box: ToolRegistry) -> None:
    result = await shell(box, "echo hello; echo problem >&2; exit 3")
    assert result.answer == {"plain_text_response": "hello\nproblem\n\n[exit code: 3]"}


async def test_the_output_streams(box: ToolRegistry) -> None:
    pieces: list[str] = []
    context = ToolCallContext(on_output=pieces.append)
    tool = box.find("exec_shell_command")
    result = await tool.call({"command": "echo one; sleep 0.1; echo two"}, context)
    assert pieces == ["one\n", "two\n", "\n[exit code: 0]"]
    assert "".join(pieces) == result.text


async def test_long_output_is_cut_and_a_command_ends_at_its_time(box: ToolRegistry) -> None:
    assert (await shell(box, "echo 123456", max_output_size=3)).text == (
        "123\n[output truncated]\n[exit code: 0]"
    )
    large = await shell(box, "head -c 100000 /dev/zero | tr '\\0' x", max_output_size=10**9)
    assert len(large.text.split("\n")[0]) == 16384
    late = await shell(box, "echo begun; sleep 1000", timeout=1)
    assert late.text == "begun\n\n[exit code: 137] [exit due to timed out]"


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({}, "command"),
        ({"command": "true\0"}, "command"),
        ({"command": "\ud800"}, "command"),
        ({"command": "x" * 200_000}, "command"),
        ({"command": "true", "timeout": 0}, "timeout"),
        ({"command": "true", "max_output_size": -1}, "max_output_size"),
    ],
)
async def test_arguments_are_checked(
    box: ToolRegistry, arguments: dict[str, Any], param: str
) -> None:
    with pytest.raises(InvalidRequestError) as raised:
        await box.find("exec_shell_command").call(arguments, ToolCallContext())
    assert raised.value.param == param


async def test_a_command_starts_in_the_directory_of_the_call(
    box: ToolRegistry, tmp_path: Path
) -> None:
    (tmp_path / "inner").mkdir()
    tool = box.find("exec_shell_command")
    result = await tool.call({"command": "pwd"}, ToolCallContext(cwd="inner"))
    assert result.text.startswith(f"{tmp_path}/inner\n")
    with pytest.raises(InvalidRequestError, match="outside of the directories"):
        await tool.call({"command": "pwd"}, ToolCallContext(cwd="/etc"))


async def test_a_command_writes_inside_the_directory_and_nowhere_else(
    box: ToolRegistry, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_text("secret words")
    (tmp_path / "link").symlink_to(outside)
    commands = [
        f"cat {outside}/secret", "cat link/secret", f"ls {outside}", f"touch {outside}/new",
        "echo >link/secret", f"mv own {outside}/own", f"ln {outside}/secret here; cat here",
        f"rm -r {outside}", "ls /root", "ls /home", "touch /etc/new /usr/new /dev/shm/new",
    ]  # fmt: skip
    (tmp_path / "own").write_text("own words")
    for command in commands:
        result = await shell(box, command)
        assert "exit code: 0" not in result.text, command
        assert "secret words" not in result.text, command
    assert [one.name for one in outside.iterdir()] == ["secret"]
    assert (outside / "secret").read_text() == "secret words"
    done = await shell(
        box, "cat own && echo more >> own && mkdir -p a/b && mv own a/b/own && ls a/b"
    )
    assert done.text == "own words" + "own\n\n[exit code: 0]"


async def test_a_command_has_few_variables_and_a_home_of_its_own(
    box: ToolRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("SECRET_TOKEN", "secret")
    monkeypatch.setenv("LC_ALL", "C.UTF-8")
    result = await shell(box, "env; echo x > ~/x && echo y > $TMPDIR/y && ls -a ~")
    lines = result.text.splitlines()
    names = {line.partition("=")[0] for line in lines if "=" in line}
    assert {"HOME", "LC_ALL", "PATH", "TMPDIR"} <= names
    assert "SECRET_TOKEN" not in names
    assert not any("KEY" in name or name.startswith(("PYTEST", "OPENAI")) for name in names)
    home = next(line[5:] for line in lines if line.startswith("HOME="))
    assert {"x", "y"} <= set(lines)
    assert not os.path.exists(home)


async def test_programs_that_a_command_makes_are_not_run_outside_of_the_sandbox(
    box: ToolRegistry, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    outside = tmp_path_factory.mktemp("outside") / "touched"
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    trap = f"#!/bin/sh\ntouch {outside}\n"
    for name in ("sh", "rm", "chmod"):
        (tmp_path / name).write_text(trap)
        (tmp_path / name).chmod(0o755)
    # Here, `sh` is the one of the folder: inside the sandbox.
    assert "cannot touch" in (await shell(box, "true")).text
    (tmp_path / "sh").unlink()
    # Its folder is removed afterwards, outside of the sandbox.
    await shell(box, "mkdir -p $TMPDIR/a/b")
    assert not outside.exists()


async def test_a_command_cannot_look_into_the_server_or_end_it(box: ToolRegistry) -> None:
    server = f"/proc/{os.getpid()}"
    for file in ("environ", "maps", "mem", "fd/1", "cwd/."):
        result = await shell(box, f"cat {server}/{file}")
        # In a namespace of processes, the server does not exist.
        assert re.search("Permission denied|No such file", result.text), file
    assert "exit code: 1" in (await shell(box, f"kill -0 {os.getpid()}")).text


async def test_a_command_has_no_terminal_and_no_descriptors(box: ToolRegistry) -> None:
    result = await shell(box, "ls /proc/$$/fd; cat; tty; : </dev/tty")
    assert result.text.split()[:3] == ["0", "1", "2"]
    assert "not a tty" in result.text
    assert "exit code: 0" not in result.text


async def test_a_call_cannot_leave_the_sandbox_by_naming_another_runtime(box: ToolRegistry) -> None:
    for runtime in ("ssh:localhost", "docker-container:abc"):
        with pytest.raises(ToolRuntimeError, match="--tools-dir /"):
            await box.find("exec_shell_command").call(
                {"command": "true"}, ToolCallContext(runtime=runtime)
            )


async def test_get_info_tells_the_system_and_the_directory(
    box: ToolRegistry, tmp_path: Path
) -> None:
    result = await box.find("get_info").call({}, ToolCallContext())
    assert result.answer["cwd"] == str(tmp_path)
    assert os.uname().release in result.answer["os"]
