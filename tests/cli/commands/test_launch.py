"""`trioserve launch`: which server an agent gets, and how it is run."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio

from tests.support.fake_fleet import routed
from tests.support.http_server import serving_script
from tests.support.processes import all_processes, parent_of
from tests.support.waiting import patiently, until
from trioserve.cli.agents import NO_KEY, Endpoint
from trioserve.cli.commands.launch import AgentServer
from trioserve.cli.main import main
from trioserve.cli.named import with_files
from trioserve.config.parse import parse
from trioserve.errors import (
    AmbiguousModelError,
    ConfigError,
    UnavailableError,
    UnknownModelError,
)
from trioserve.models import BUNDLED

# -- which server


def server(url: str | None, *flags: str) -> AgentServer:
    return AgentServer(url, parse(flags, {}).config, flags, {})


async def endpoint(url: str | None, *flags: str) -> Endpoint:
    async with server(url, *flags).endpoint() as found:
        return found


async def test_a_server_that_runs_is_used() -> None:
    async with serving_script() as (url, _):
        found = await endpoint(url)
        assert found == Endpoint(url=url, model="scripted", context=1024)
        assert found.api_key == NO_KEY
        port = url.rpartition(":")[2]
        assert await endpoint(None, "--port", port) == found


async def test_a_flag_may_need_a_server_of_the_command() -> None:
    async with serving_script() as (url, _):
        flags = ("--port", url.rpartition(":")[2], "--tts", "v.gguf")
        assert await server(None, *flags)._running() is not None
        own = attrs.evolve(server(None, *flags), own=("tts",))
        assert await own._running() is None
        assert await attrs.evolve(own, url=url)._running() is not None
        assert await attrs.evolve(own, flags=flags[:2])._running() is not None


async def test_the_api_key_is_that_of_the_flags() -> None:
    async with serving_script(api_keys=("secret",)) as (url, _):
        assert (await endpoint(url, "--api-key", "secret")).api_key == "secret"
        with pytest.raises(Exception, match="Invalid API Key"):
            await endpoint(url)


@pytest.mark.parametrize("name", ["qwen3", "second", "/models/qwen3.gguf", "Qwen3", "sec"])
async def test_a_model_is_found_by_its_name_or_file(name: str) -> None:
    async with serving_script(alias="qwen3,second") as (url, _):
        assert (await endpoint(url, "--model", name)).model == "scripted"


async def test_the_server_at_the_url_must_have_the_model() -> None:
    async with serving_script() as (url, _):
        with pytest.raises(ConfigError, match=r"has no model gemma\.gguf; it has scripted"):
            await endpoint(url, "--model", "gemma.gguf")


async def test_a_name_must_mean_one_model_of_a_router() -> None:
    async with routed({"one": None, "other": None}) as router:
        with pytest.raises(ConfigError, match="name the model with --model; the server has one, o"):
            await endpoint(router.url)
        with pytest.raises(AmbiguousModelError, match="'o' may be any of 2: one, other"):
            await endpoint(router.url, "--model", "o")


async def test_a_router_is_used_with_the_model_that_is_named_or_loaded() -> None:
    from trioserve.testing import ScriptedBackend

    async with routed({"one": None, "two": ScriptedBackend(n_ctx=2048)}) as router:
        for flags in ([], ["--model", "two"]):
            found = await endpoint(router.url, *flags)
            assert (found.model, found.context) == ("two", 2048)


async def test_a_model_that_is_not_loaded_is_loaded_first() -> None:
    async with routed({"one": None, "two": None}) as router:
        router.fleet.failures["one"] = UnavailableError("It does not start.")
        with pytest.raises(UnavailableError, match=r"It does not start\."):
            await endpoint(router.url, "--model", "one")


async def test_an_agent_cannot_use_a_unix_socket(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="need an address with a port"):
        await endpoint(str(tmp_path / "s.sock"))


def test_without_a_server_a_model_of_this_machine_is_found_by_a_part_of_its_name(
    tmp_path: Path,
) -> None:
    for name in ("tiny-chat.gguf", "tiny-code.gguf"):
        (tmp_path / name).touch()

    def files(name: str) -> Sequence[str]:
        flags = ("--models-dir", str(tmp_path), "--api-key", "k", "--model", name)
        found = with_files(flags, {})
        return [parse(found, {}).config.model or "", *parse(found, {}).config.api_keys]

    assert files("Chat") == [str(tmp_path / "tiny-chat.gguf"), "k"]
    assert files("bundled") == [str(BUNDLED), "k"]
    for untouched in ("chat.gguf", "some/where", str(tmp_path)):
        assert files(untouched) == [untouched, "k"]
    with pytest.raises(AmbiguousModelError, match="tiny-chat, tiny-code"):
        files("tiny")
    with pytest.raises(UnknownModelError, match=r"no model 'large'\. The models are: tiny-"):
        files("large")


# -- what cannot be started


@pytest.mark.parametrize(
    ("argv", "problem"),
    [
        ([], "launch needs {codex,claude,"),
        (["--model", "x.gguf"], "launch needs {codex,claude,"),
        (["codx"], "not 'codx'; did you mean codex?"),
        (["emacs"], "the word after launch must be one of codex, claude, "),
        (["codex", "--nonsense"], "--nonsense"),
        (["codex"], "Codex is not installed; install it with: npm install -g @openai/codex"),
    ],
)
def test_what_cannot_be_started(
    argv: Sequence[str],
    problem: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", *argv]) == 2
    assert problem in capsys.readouterr().err


def test_help_is_for_the_agent_after_two_dashes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["launch", "pi", "--help"]) == 0
    assert "usage: trioserve launch" in capsys.readouterr().out
    assert main(["launch", "pi", "--", "--help"]) == 2
    assert "pi is not installed" in capsys.readouterr().err


# -- how it is run

#: Stands for the agent pi. It prints its arguments, variables and extension; its last argument says
#: how it ends.
AGENT = f"""#!{sys.executable}
import json, os, signal, sys, time
def on_signal(number, frame):
    print(json.dumps(number), flush=True)
    sys.exit(3)
mode = sys.argv[-1]
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, on_signal if mode == "wait" else signal.SIG_DFL)
extension = open(sys.argv[sys.argv.index("-e") + 1]).read()
print(json.dumps([sys.argv[1:], dict(os.environ), extension]), flush=True)
if mode == "die":
    os.kill(os.getpid(), signal.SIGKILL)
if mode in ("wait", "read"):
    sys.stdin.read()
sys.exit(int(mode))
"""


class Launch:
    """A command that runs, with the agent in its place."""

    def __init__(self, process: trio.Process) -> None:
        self.process = process
        self._unread = b""

    async def line(self) -> Any:
        """Wait for the next line that the agent writes."""
        assert self.process.stdout is not None
        with patiently():
            while b"\n" not in self._unread:
                data = await self.process.stdout.receive_some()
                assert data, "the agent has ended"
                self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    async def code(self) -> int:
        with patiently():
            return await self.process.wait()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pi").write_text(AGENT)
    (tmp_path / "pi").chmod(0o755)
    return tmp_path


async def launch(folder: Path, *argv: str) -> Launch:
    environ = {**os.environ, "PATH": str(folder), "TMPDIR": str(folder)}
    process = await trio.lowlevel.open_process(
        [sys.executable, "-m", "trioserve", "launch", "pi", *argv],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environ,
        start_new_session=True,
    )
    return Launch(process)


@pytest.mark.system
@pytest.mark.parametrize(("mode", "code"), [("0", 0), ("7", 7), ("die", 128 + signal.SIGKILL)])
async def test_an_agent_runs_with_its_settings(folder: Path, mode: str, code: int) -> None:
    async with serving_script() as (url, _):
        running = await launch(folder, "--url", url, "--", "--flag", mode)
        arguments, environ, extension = await running.line()
        assert await running.code() == code
    assert arguments[-2:] == ["--flag", mode]
    assert environ["TRIOSERVE_API_KEY"] == NO_KEY
    assert url in extension
    assert list(folder.iterdir()) == [folder / "pi"], "the files of the run are left"


@pytest.mark.system
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_signals_are_for_the_agent(folder: Path, number: signal.Signals) -> None:
    async with serving_script() as (url, _):
        running = await launch(folder, "--url", url, "--", "wait")
        await running.line()
        if number is signal.SIGINT:  # a terminal sends it to both
            os.killpg(running.process.pid, number)
        else:
            running.process.send_signal(number)
        assert await running.line() == number
        assert await running.code() == 3


async def answers(url: str) -> bool:
    async with httpx.AsyncClient(base_url=url) as client:
        try:
            return (await client.get("/health")).status_code == 200
        except httpx.ConnectError:
            return False


@pytest.mark.system
@pytest.mark.parametrize("end", ["of the agent", "by SIGKILL"])
async def test_a_server_is_started_and_ends_with_the_agent(folder: Path, end: str) -> None:
    running = await launch(folder, "--port", "1", "--threads", "1", "--", "read")
    _, _, extension = await running.line()
    url = json.loads(extension.partition('"baseUrl": ')[2].partition(", ")[0]).removesuffix("/v1")
    assert await answers(url)
    if end == "of the agent":
        assert running.process.stdin is not None
        await running.process.stdin.aclose()
        assert await running.code() != 0  # the fake agent has no number to exit with
        assert not await answers(url)
    else:
        [server] = [
            one
            for one in all_processes()
            if parent_of(one) == running.process.pid
            and b"--port" in Path(f"/proc/{one}/cmdline").read_bytes()
        ]
        running.process.kill()
        await running.code()
        await until(lambda: server not in all_processes())
        assert not await answers(url)


@pytest.mark.system
async def test_a_model_that_cannot_be_loaded(folder: Path) -> None:
    (folder / "x.gguf").write_text("no model")
    ended = await trio.run_process(
        [sys.executable, "-m", "trioserve", "launch", "pi", "--port", "1", "-m", "x.gguf"],
        cwd=folder,
        env={**os.environ, "PATH": str(folder), "PYTHONPATH": str(Path(__file__).parents[3])},
        capture_stderr=True,
        check=False,
    )
    assert ended.returncode == 1
    assert ended.stderr.startswith(b"trioserve: ") and b"x.gguf" in ended.stderr
