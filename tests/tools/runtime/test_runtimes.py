"""Tools in containers and on other hosts, which programs of the tests stand for."""

from __future__ import annotations

import base64
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support.processes import is_alive, with_variable
from tests.tools.runtime.conftest import Fake
from tests.tools.test_process_ends import until
from trioserve.config import Config
from trioserve.errors import ToolRuntimeError
from trioserve.tools.registry import ToolRegistry, open_registry
from trioserve.tools.runtime import WATCHED
from trioserve.tools.tool import ToolCallContext, ToolResult

pytestmark = pytest.mark.system

RUNTIMES = ["docker:alpine", "podman-container:box", "ssh:user@host.example"]


@asynccontextmanager
async def box_in(runtime: str | None, folder: str = "/") -> AsyncIterator[ToolRegistry]:
    config = Config(model="m.gguf", tools=("all",), tools_dir=(folder,), tools_runtime=runtime)
    async with open_registry(config) as box:
        yield box


async def call(box: ToolRegistry, tool: str, context: ToolCallContext | None = None,
               /, **arguments: Any) -> ToolResult:  # fmt: skip
    return await box.find(tool).call(arguments, context or ToolCallContext())


@pytest.mark.parametrize("runtime", RUNTIMES)
async def test_all_tools_run_in_a_runtime(fake: Fake, runtime: str) -> None:
    async with box_in(runtime) as box:
        written = await call(box, "write_file", path="a b/$(x)'.txt", content="one\ntwo\n")
        assert not written.is_error, written.text
        assert (fake.folder / "a b" / "$(x)'.txt").read_text() == "one\ntwo\n"
        assert (await call(box, "read_file", path="a b/$(x)'.txt")).text == "one\ntwo\n"
        edited = await call(
            box, "edit_file", path="a b/$(x)'.txt", edits=[{"old_text": "two", "new_text": "2"}]
        )
        assert not edited.is_error, edited.text
        found = await call(box, "file_glob_search", path=".", include="*.txt")
        assert found.text.startswith("a b/$(x)'.txt\n")
        assert found.answer["base"] == f"{fake.folder}/."
        assert "2" in (await call(box, "grep_search", path=".", pattern="^2$")).text
        shell = await call(box, "exec_shell_command", command="pwd; echo 'a  b' >&2; exit 4")
        assert shell.text == f"{fake.folder}\na  b\n\n[exit code: 4]"
        info = await call(box, "get_info")
        assert info.answer["cwd"] == str(fake.folder)
        context = ToolCallContext(cwd=f"{fake.folder}/a b")
        assert "$(x)" in (await call(box, "exec_shell_command", context, command="ls")).text
        assert (await call(box, "read_file", context, path="$(x)'.txt")).text == "one\n2\n"
    assert fake.containers == []


@pytest.mark.parametrize("runtime", RUNTIMES[1:])
async def test_bytes_arrive_as_they_are(fake: Fake, runtime: str) -> None:
    data = bytes(range(256)) * 1000
    (fake.folder / "x").write_bytes(data)
    async with box_in(runtime) as box:
        context = ToolCallContext(response_type="base64")
        result = await call(box, "read_file", context, path="x")
        assert base64.b64decode(result.answer["base64"]) == data


async def test_what_is_not_there_is_told(fake: Fake) -> None:
    async with box_in(RUNTIMES[1]) as box:
        for path in ("missing", "box/below", "."):
            assert (await call(box, "read_file", path=path)).is_error
        result = await call(box, "file_glob_search", path="missing")
        assert "path does not exist or is not a directory" in result.text
        result = await call(box, "write_file", path="box/below", content="x")
        assert "failed to write file" in result.text
        context = ToolCallContext(cwd="/missing")
        result = await call(box, "exec_shell_command", context, command="true")
        assert "exit code: 127" in result.text


async def test_ignored_files_and_junk_are_not_listed(fake: Fake) -> None:
    for name in ("src/a.c", "build/b.c", "log/c.c"):
        (fake.folder / name).parent.mkdir()
        (fake.folder / name).touch()
    async with box_in(RUNTIMES[1]) as box:
        found = await call(box, "file_glob_search", path=".", include="*.c")
        assert found.text.splitlines()[:2] == ["log/c.c", "src/a.c"]
        found = await call(box, "file_glob_search", path=".", type="dir", max_depth=1)
        assert found.text.splitlines()[:3] == ["build/", "log/", "src/"]
        await trio.run_process(["git", "init", "-q"], cwd=fake.folder)
        (fake.folder / ".gitignore").write_text("log\n")
        found = await call(box, "file_glob_search", path=".", include="*.c")
        assert found.text.splitlines()[:2] == ["build/b.c", "src/a.c"]


async def test_a_container_is_started_by_the_first_call_and_removed_at_the_end(fake: Fake) -> None:
    async with box_in("docker:debian:stable") as box:
        assert fake.containers == []
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(call, box, "get_info")
        (name,) = fake.containers
        started = [line for line in fake.calls if " run " in line]
        assert started == [
            f"docker run --rm -i --name {name} --pids-limit=64 --memory=2147483648 debian:stable sh"
        ]
    assert fake.containers == []


async def test_a_container_that_has_ended_is_started_again(fake: Fake) -> None:
    async with box_in("docker:alpine") as box:
        await call(box, "get_info")
        (name,) = fake.containers
        pid = int((fake.folder / name).read_text())
        os.kill(pid, signal.SIGKILL)
        until(lambda: not is_alive(pid))
        await trio.sleep(0.05)  # for its supervisor
        assert (await call(box, "get_info")).answer["cwd"] == str(fake.folder)
        (second,) = fake.containers
        assert second != name
    assert fake.containers == []


async def test_a_container_that_cannot_be_started_is_told(fake: Fake) -> None:
    async with box_in("docker:missing") as box:
        for _ in range(2):
            with pytest.raises(ToolRuntimeError, match="cannot start missing: no such image"):
                await call(box, "get_info")


async def test_a_start_that_is_cancelled_leaves_nothing(fake: Fake) -> None:
    async with box_in("docker:alpine") as box:
        with trio.move_on_after(0.03):
            await call(box, "get_info")
        assert not (await call(box, "get_info")).is_error
    assert fake.containers == []


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("fake:does-not-exist", "unknown tool runtime: fake:does-not-exist"),
        ("", "unknown tool runtime"),
        ("docker:alpine", "must name a running container"),
        ("docker-container:--privileged", "invalid container id"),
        ("podman-container:", "invalid container id"),
        ("docker-container:a\n", "invalid container id"),
        ("other-container:a", "unknown tool runtime"),
        ("ssh:-oProxyCommand=touch /tmp/pwned", "invalid ssh target"),
        ("ssh:a;b", "invalid ssh target"),
    ],
)
async def test_a_name_that_is_no_place_is_refused(fake: Fake, name: str, message: str) -> None:
    async with box_in(None) as box:
        for tool in ("exec_shell_command", "get_info", "read_file"):
            with pytest.raises(ToolRuntimeError, match=message):
                await call(box, tool, ToolCallContext(runtime=name), command="echo hi", path="x")
    assert not (fake.folder / "calls").exists()


@pytest.mark.parametrize("name", ["fake:x", "docker:-v", "ssh:-v", "docker-container:"])
async def test_a_configuration_that_names_no_place_ends_the_start(name: str) -> None:
    with pytest.raises(ToolRuntimeError):
        async with box_in(name):
            pytest.fail("it was opened")


async def test_clients_may_name_places_only_where_nothing_is_confined(
    fake: Fake, tmp_path: Path
) -> None:
    context = ToolCallContext(runtime="docker-container:box")
    async with box_in(None) as box:
        result = await call(box, "exec_shell_command", context, command="pwd")
        assert result.text.startswith(str(fake.folder))
    for runtime, folder in ((None, str(tmp_path)), ("ssh:host", "/")):
        async with box_in(runtime, folder) as box:
            with pytest.raises(ToolRuntimeError, match="--tools-dir /"):
                await call(box, "exec_shell_command", context, command="pwd")
    async with box_in("docker-container:box", str(tmp_path)) as box:
        result = await call(box, "exec_shell_command", context, command="pwd")
        assert result.text.startswith(str(fake.folder))


@pytest.mark.parametrize("shell", ["dash", "bash", "busybox"])
def test_a_command_elsewhere_ends_when_nobody_waits(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell}")
    command = "sleep 1000 & setsid sleep 1000 & setsid -f sleep 1000; echo $$ $!; wait"
    words = [shell, *["sh"] * (shell == "busybox"), "-c", WATCHED, "sh", *[str(tmp_path)] * 2]
    with subprocess.Popen(
        [*words, "sh", "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as watched:
        assert watched.stdin is not None
        assert watched.stdout is not None
        assert watched.stdout.readline()
        try:
            # In the middle of `exec`, a process seems to have no variables.
            until(lambda: len(with_variable("TRIOSERVE_CALL", str(tmp_path))) == 4)
            pids = with_variable("TRIOSERVE_CALL", str(tmp_path))
        finally:
            watched.stdin.close()
        until(lambda: not any(map(is_alive, pids)))
        assert watched.wait() == 128 + 9
