"""Real servers as the processes of a fleet: how they start, die, hang and end."""

from __future__ import annotations

import base64
import os
import random
import shutil
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import trio

from tests.support.media_files import image_file
from tests.support.processes import all_processes, is_alive, parent_of
from tests.support.scripted_children import ScriptedCatalog
from tests.support.waiting import patiently, until
from trioserve.children.launch import Forks, open_launcher
from trioserve.config import Config
from trioserve.errors import InvalidRequestError, ModelLoadError, ModelProcessError
from trioserve.model_process.connection import Line
from trioserve.model_process.server import ChildServer
from trioserve.models import BUNDLED
from trioserve.models.catalog import Catalog, ModelEntry, Source, environment_of_children
from trioserve.router.child import HealthCheck, ModelChild, ask_live
from trioserve.router.fleet import Fleet
from trioserve.router.states import Status
from trioserve.server.limits.memory import MemoryBudget
from trioserve.tools.registry import ToolRegistry

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="forks are of Linux only"),
]


def entry(name: str, path: Path = BUNDLED, *flags: str) -> ModelEntry:
    args = ("--model", str(path), "--alias", name, "-t", "1", "-np", "2", *flags)
    return ModelEntry(name=name, source=Source.DIRECTORY, args=args, path=path)


@asynccontextmanager
async def fleet_of(*entries: ModelEntry, max_models: int = 4) -> AsyncIterator[Fleet]:
    catalog = ScriptedCatalog(*entries)
    with patiently():
        async with Fleet(catalog, max_models=max_models) as fleet:  # type: ignore[arg-type]
            yield fleet


def server_of(child: ModelChild) -> ChildServer:
    assert child.config is not None
    memory = MemoryBudget.of(child.config)
    return ChildServer(child.line, child.config, tools=ToolRegistry(), memory=memory)


async def answer(child: ModelChild) -> str:
    """Have a process answer; gives the name of its model."""
    server = server_of(child)
    answered = await server.complete("Once", max_tokens=4, temperature=0)
    assert answered.text
    return server.model.names[0]


async def restarted(fleet: Fleet, one: ModelEntry) -> None:
    async with fleet.use(one) as child:
        assert await answer(child) == one.name


async def test_it_serves_and_gives_everything_back() -> None:
    one = entry("one")
    async with fleet_of(one) as fleet:
        async with fleet.use(one) as child:
            assert await answer(child) == "one"
            assert os.getsid(child.pid or 0) == child.pid
        await fleet.drain()
        assert child.exit_code == 0
        assert fleet.state("one").value is Status.UNLOADED


async def test_what_a_process_has_started_ends_when_it_is_killed() -> None:
    one = entry("one", BUNDLED, "--mmproj", str(BUNDLED.with_name("bundled-mmproj.gguf")))
    image = f"data:image/png;base64,{base64.b64encode(image_file()).decode()}"
    picture = [{"type": "image_url", "image_url": {"url": image}}]
    messages = [{"role": "user", "content": picture}]
    async with fleet_of(one) as fleet, fleet.use(one) as child:
        await server_of(child).chat(messages, max_tokens=1)
        assert child.pid is not None
        decoders = [pid for pid in all_processes() if parent_of(pid) == child.pid]
        assert decoders and all(os.getsid(one) == one for one in decoders), "in their own sessions"
        os.kill(child.pid, signal.SIGKILL)
        await child.ended.wait()
        assert child.exit_code == -signal.SIGKILL
        await until(lambda: not any(map(is_alive, decoders)))


async def test_a_file_that_is_broken_gone_or_back_again(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    one = entry("one", path)
    async with fleet_of(one) as fleet:
        path.write_bytes(BUNDLED.read_bytes()[:100_000])
        with pytest.raises(ModelLoadError, match=r"model\.gguf"):
            async with fleet.use(one):
                raise AssertionError
        shutil.copy(BUNDLED, path)
        await restarted(fleet, one)
        path.unlink()
        await restarted(fleet, one)  # it is loaded, and stays so
        await fleet.unload(one)
        with pytest.raises(ModelLoadError, match=r"model\.gguf"):
            async with fleet.use(one):
                raise AssertionError


def memory_of_others() -> int:
    """Bytes that the processes below this one take, where what several share counts once."""
    total = 0
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text().split():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has just ended
                text = Path(f"/proc/{pid}/smaps_rollup").read_text()
                total += int(text.partition("\nPss:")[2].split()[0]) * 1024
    return total


async def test_requests_at_random_are_answered_by_the_right_models_and_memory_comes_back() -> None:
    entries = [entry(f"model-{number}") for number in range(10)]
    chosen = random.Random(13)
    n_answered = 0

    async def ask(fleet: Fleet, one: ModelEntry) -> None:
        nonlocal n_answered
        async with fleet.use(one) as child:
            assert await answer(child) == one.name
            assert sum(fleet.state(each.name).pid is not None for each in entries) <= 3
            n_answered += 1

    async with fleet_of(*entries, max_models=3) as fleet:
        await ask(fleet, entries[0])
        await unloaded(fleet, entries)
        before = memory_of_others()
        async with trio.open_nursery() as nursery:
            for _ in range(60):
                nursery.start_soon(ask, fleet, chosen.choice(entries))
        assert n_answered == 61
        running = memory_of_others()
        await unloaded(fleet, entries)
        after = memory_of_others()
    assert running > before + 3 * 2**24, "three models take memory"
    assert after < before + 2**22, "and give it back"


async def unloaded(fleet: Fleet, entries: list[ModelEntry]) -> None:
    """Unload what runs, and wait until it has."""
    with fleet.events.subscribe() as events:
        for one in entries:
            if fleet.state(one.name).pid is not None:
                await fleet.unload(one)
                assert (await anext(events)).data == {"status": "unloaded", "exit_code": 0}


async def test_what_is_forked_has_one_thread() -> None:
    """A fork has only the thread that forks: what others have locked would stay so for ever."""
    async with open_launcher(environment_of_children(os.environ)) as launcher:
        process = await launcher.launch(["--version"])
        assert isinstance(launcher, Forks)
        assert len(os.listdir(f"/proc/{launcher.pid}/task")) == 1
        assert await process.ended() == 0
        process.close()


async def test_models_of_a_directory_within_a_limit_of_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path / "none"))
    for name in ("first", "second"):
        (tmp_path / f"{name}.gguf").symlink_to(BUNDLED)
    (tmp_path / "broken.gguf").write_bytes(b"GGUF" + bytes(100))
    own_args = ("-t", "1", "-np", "1", "-c", "4096", "--embd-ctx-size", "0")
    catalog = await trio.to_thread.run_sync(Catalog, Config(models_dir=str(tmp_path)), own_args)
    with patiently():
        async with Fleet(catalog, max_memory=30 * 2**20) as fleet:
            for name in ("first", "second", "first"):
                one = catalog.find(name)
                async with fleet.use(one) as child:
                    assert await answer(child) == one.name
                    need = fleet.state(one.name).memory
                    assert need is not None and 15 * 2**20 < need < 30 * 2**20, "one fits"
                assert [name for name in catalog.entries if fleet.state(name).pid] == [one.name]
            with pytest.raises(ModelLoadError, match=r"broken\.gguf"):
                async with fleet.use(catalog.find("broken")):
                    raise AssertionError
            assert fleet.state("first").value is Status.LOADED, "nothing gave way for it"


async def test_a_process_that_is_stopped_is_killed_and_its_streams_have_one_error_each() -> None:
    one = entry("one", BUNDLED, "-c", "8192")
    is_stopped, errors = False, list[ModelProcessError]()

    async def ask_when_stopped(line: Line) -> None:
        if is_stopped:  # a machine that is slow answers late
            await ask_live(line)

    watch = HealthCheck(interval=0.1, answer_timeout=0.5, ask=ask_when_stopped)
    with patiently():
        async with Fleet(ScriptedCatalog(one), watch=watch) as fleet:  # type: ignore[arg-type]

            async def ask(began: trio.Event) -> None:
                async with fleet.use(one) as child:
                    try:
                        async with server_of(child).stream_complete(
                            "Once", max_tokens=3000, ignore_eos=True
                        ) as stream:
                            await anext(stream)
                            began.set()
                            await stream.read()
                    except ModelProcessError as error:
                        errors.append(error)

            async with trio.open_nursery() as nursery:
                for _ in range(2):
                    began = trio.Event()
                    nursery.start_soon(ask, began)
                    await began.wait()
                child = fleet.child("one")
                assert child is not None and child.pid is not None
                os.kill(child.pid, signal.SIGSTOP)
                is_stopped = True
            is_stopped = False
            assert len(errors) == 2
            assert child.message == "It does not answer within 0.5 seconds."
            await restarted(fleet, one)


async def test_a_process_that_is_killed_at_any_moment() -> None:
    one = entry("one")
    chosen = random.Random(7)
    async with fleet_of(one) as fleet:
        for _ in range(6):
            async with fleet.use(one) as child:
                ended: list[str] = []

                async def ask(child: ModelChild = child, ended: list[str] = ended) -> None:
                    try:
                        ended.append(await answer(child))
                    except ModelProcessError as error:
                        ended.append(error.message)

                async with trio.open_nursery() as nursery:
                    for _ in range(4):
                        nursery.start_soon(ask)
                    await trio.sleep(chosen.uniform(0, 0.02))
                    if child.pid is not None:
                        os.kill(child.pid, signal.SIGKILL)
                assert len(ended) == 4
            await child.finished.wait()
            if not fleet.is_ready(one):
                with suppress(InvalidRequestError):  # it is started again by itself
                    await fleet.load(one)
