"""Models in processes of their own, as a program uses them."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs
import pytest
import trio

from tests.support.http_server import child_app
from tests.support.waiting import patiently, until
from trioserve.errors import UnavailableError
from trioserve.remote.client import ServerClient
from trioserve.remote.server import RemoteServer
from trioserve.router.fleet import Fleet
from trioserve.router.models import ChildModels, send_to

HI = [{"role": "user", "content": "Hi"}]


@attrs.define
class OneChild:
    """A fleet with one process, which may take its time to start."""

    socket_path: Path
    ready: trio.Event = attrs.field(factory=trio.Event)
    ended: trio.Event = attrs.field(factory=trio.Event)
    kept: None = None

    @asynccontextmanager
    async def use(self, entry: object, **options: object) -> AsyncIterator[OneChild]:
        await self.ready.wait()
        yield self


@asynccontextmanager
async def one_child(folder: Path) -> AsyncIterator[tuple[RemoteServer, OneChild]]:
    """A server on a socket in a folder, as a process of a fleet."""
    child = OneChild(folder / "a.sock")
    send = partial(send_to, cast(Fleet, child), cast(Any, None))
    async with child_app(child.socket_path):
        child.ready.set()
        yield RemoteServer.over(ServerClient(send)), child


async def test_a_deadline_holds_from_the_start(tmp_path: Path) -> None:
    async with one_child(tmp_path) as (server, child):
        child.ready = trio.Event()
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.05):
            await server.complete("a")
        child.ready.set()
        assert (await server.complete("a")).text == "A"


async def test_a_process_that_has_gone_before_it_was_asked(tmp_path: Path) -> None:
    async with one_child(tmp_path) as (server, child), trio.open_nursery() as nursery:
        path, child.socket_path = child.socket_path, tmp_path / "gone.sock"
        with pytest.raises(trio.TooSlowError), trio.fail_after(0.05):
            await server.complete("a")
        texts = list[str]()

        async def complete() -> None:
            texts.append((await server.complete("a")).text)

        nursery.start_soon(complete)
        await trio.testing.wait_all_tasks_blocked(0.01)
        child.socket_path = path  # that of the next one
        child.ended.set()
        await until(lambda: texts)
        assert texts == ["A"]


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
