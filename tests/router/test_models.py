"""Models in separate processes, as a program uses them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from tests.support.model_processes import InName, LauncherInName
from tests.support.scripted_children import ScriptedCatalog, ScriptedLauncher, entry
from tests.support.waiting import patiently
from trioserve.config import Config
from trioserve.errors import UnavailableError
from trioserve.model_process.server import ChildServer
from trioserve.router.fleet import Fleet
from trioserve.router.models import ChildModels, PlacedLine, child_server
from trioserve.testing import ScriptedBackend, scripted

HI = [{"role": "user", "content": "Hi"}]


@asynccontextmanager
async def models_in_name() -> AsyncIterator[tuple[Fleet, LauncherInName]]:
    """A fleet of one model, whose process is such in name only."""
    async with trio.open_nursery() as nursery:
        launcher = LauncherInName(
            nursery, lambda _: InName(Config(), scripted(ScriptedBackend(lambda _: "A")))
        )
        async with Fleet(ScriptedCatalog(entry("a")), launcher=launcher) as fleet:  # type: ignore[arg-type]
            yield fleet, launcher
        nursery.cancel_scope.cancel()


def server_of(fleet: Fleet) -> ChildServer:
    return child_server(PlacedLine(fleet, fleet.catalog.entries["a"]))


async def test_a_process_is_started_when_it_is_needed() -> None:
    async with models_in_name() as (fleet, launcher):
        server = server_of(fleet)
        assert not launcher.started
        assert (await server.complete("a")).text == "A"
        assert server.model.info.name == "scripted" and len(launcher.started) == 1


async def test_a_deadline_holds_from_the_start() -> None:
    launcher = ScriptedLauncher(ready=False)
    async with Fleet(ScriptedCatalog(entry("a")), launcher=launcher) as fleet:  # type: ignore[arg-type]
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.05):
            await server_of(fleet).complete("a")


async def test_a_process_that_has_gone_before_it_was_asked() -> None:
    async with models_in_name() as (fleet, launcher):
        server = server_of(fleet)
        await server.complete("a")
        launcher.started[0].die()
        with patiently():
            await fleet.child("a").finished.wait()  # type: ignore[union-attr]
            assert (await server.complete("a")).text == "A"
        assert len(launcher.started) == 2


@pytest.mark.system
async def test_real_processes(tmp_path: Path) -> None:
    models = ChildModels(tmp_path, flags=["--ctx-size", "512", "--threads", "1"])
    with pytest.raises(RuntimeError, match="inside the block"):
        len(models)
    async with models:
        assert "bundled" in list(models)
        assert len(models) == len(list(models))
        answer = await models["bundled"].chat(HI, max_tokens=5, temperature=0)
        assert answer.finished.timings.predicted_n <= 5
        with pytest.raises(KeyError):
            models["other"]


@pytest.mark.system
async def test_tools_of_the_flags_run_in_this_process(tmp_path: Path) -> None:
    flags = ["--ctx-size", "512", "--threads", "1", "--tools", "read_file", "--tool-max-steps", "3"]
    async with ChildModels(tmp_path, flags=flags) as models:
        server = models["bundled"]
        assert server.config.tool_max_steps == 3
        answer = await server.run(HI, tools=["read_file"], max_tokens=5)
        assert answer.finished.timings.predicted_n <= 5


@pytest.mark.system
async def test_a_process_that_is_killed(tmp_path: Path) -> None:
    models = ChildModels(tmp_path, flags=["--ctx-size", "4096", "--threads", "1"])
    async with models:
        server = models["bundled"]
        async with server.stream_complete("Once", max_tokens=4000, ignore_eos=True) as stream:
            await anext(stream)
            pid = models._entered.state("bundled").pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(UnavailableError):
                await stream.read()
        with patiently():
            while models._entered.state("bundled").pid == pid:  # it is not known yet
                await trio.sleep(0.01)
            done = await server.complete("Once", max_tokens=3)
        assert len(done.tokens) == 3
