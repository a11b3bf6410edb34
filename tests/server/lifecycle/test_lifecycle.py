"""The start and the end of a server."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.scripted_server import read, serve
from tests.support.taken_threads import all_taken
from tests.support.waiting import patiently
from trioserve.config import Config
from trioserve.engine.backend import Backend
from trioserve.engine.loop import EngineLoop, Inbox
from trioserve.errors import ConfigError, ModelLoadError, ServerClosingError
from trioserve.server import Server
from trioserve.server.lifecycle.engine import in_thread
from trioserve.testing import ScriptedBackend, scripted

# -- requests that arrive together


async def test_they_are_computed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine has nothing to do, and waits until the event loop has nothing to do either."""
    monkeypatch.setattr("trioserve.server.lifecycle.engine._GATHER_SECONDS", 3600.0)
    backend, sizes = ScriptedBackend(n_slots=4), list[int]()
    backend.on_decode = lambda backend: sizes.append(backend.n_new)
    config = Config(parallel=4)
    with patiently():
        async with (
            Server(config, load=scripted(backend)) as server,
            trio.open_nursery() as nursery,
        ):
            for prompt in ("aaaa", "bbbb", "cccc", "dddd"):
                nursery.start_soon(server.complete, prompt)
    assert sizes[0] == 16


# -- the end of a server


async def test_drain_lets_running_requests_finish(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend(n_slots=2)
    async with serve(backend) as server, trio.open_nursery() as nursery:
        texts: list[str] = []

        async def follow() -> None:
            async with server.stream_complete("finish me") as stream:
                await trio.sleep(3)
                texts.append(await read(stream))

        nursery.start_soon(follow)
        await wait_all_tasks_blocked()
        with trio.fail_after(4):
            await server.drain()
        assert texts == ["FINISH ME"]
        with pytest.raises(ServerClosingError):
            await server.complete("too late")


async def test_slot_files_do_not_wait_for_an_engine_that_has_stopped(tmp_path: Path) -> None:
    async with serve(slot_save_path=str(tmp_path)) as server:
        slots = server.lifecycle.services.slots
    with pytest.RaisesGroup(ServerClosingError):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(slots.save, 0, "file", "")
            await wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()


class Waiting:
    """An engine in a step that the test ends."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.inbox = Inbox()

    def run(self) -> None:
        self.ended.wait()

    def stop(self) -> None:
        pass

    def start_helpers(self) -> None:
        pass


async def test_an_engine_that_hangs_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioserve.server.lifecycle.engine._JOIN_SECONDS", 0.0)
    engine = Waiting()
    with capture_logs() as logs:
        async with in_thread(cast(EngineLoop, engine)):
            pass
    engine.ended.set()
    assert [one["event"] for one in logs] == ["the inference thread does not end, and is left"]


async def test_a_backend_that_no_engine_takes_is_closed() -> None:
    backend = ScriptedBackend()

    @asynccontextmanager
    async def refuse(_engine: EngineLoop) -> AsyncIterator[None]:
        raise RuntimeError("can't start new thread")
        yield

    with pytest.RaisesGroup(pytest.RaisesExc(RuntimeError), flatten_subgroups=True):
        async with Server(Config(), load=scripted(backend), drive=refuse):
            pytest.fail("it has begun")
    assert backend.closed


async def test_an_end_that_takes_long_says_why(mock_clock: MockClock) -> None:
    is_closing, may_end = trio.Event(), trio.Event()

    async def work(server: Server) -> None:
        with server.lifecycle.services.workers.gate.open(lambda _error: None):
            await may_end.wait()

    async def live() -> None:
        async with serve() as server:
            nursery.start_soon(work, server)
            await wait_all_tasks_blocked()
            is_closing.set()

    async with trio.open_nursery() as nursery:
        with capture_logs() as logs:
            nursery.start_soon(live)
            await is_closing.wait()
            await wait_all_tasks_blocked()
            assert not logs
            mock_clock.jump(11)
            await wait_all_tasks_blocked()
        may_end.set()
    assert [one["event"] for one in logs] == [
        "the model is not freed yet: threads still work with it"
    ]


async def test_the_end_of_an_engine_waits_for_no_other_thread() -> None:
    engine = Waiting()

    async def live() -> None:
        async with in_thread(cast(EngineLoop, engine)):
            pass

    async with trio.open_nursery() as nursery:
        with all_taken() as limiter:
            nursery.start_soon(live)
            await wait_all_tasks_blocked()
            engine.ended.set()
            assert limiter.statistics().tasks_waiting == 0


async def test_drain_ends_what_takes_too_long(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 1000)
    async with serve(backend) as server, trio.open_nursery() as nursery:

        async def follow() -> None:
            with pytest.raises(ServerClosingError, match="5 seconds"):
                async with server.stream_complete("a") as stream:
                    await anext(stream)
                    await trio.sleep(6)
                    await read(stream)

        nursery.start_soon(follow)
        await wait_all_tasks_blocked()
        await server.drain(5)
        await wait_all_tasks_blocked()


async def test_leaving_the_server_ends_what_runs(autojump_clock: MockClock) -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 1000)
    ended = trio.Event()

    async def follow(server: Server) -> None:
        with pytest.raises(ServerClosingError):
            async with server.stream_complete("a") as stream:
                await anext(stream)
                await trio.sleep(1)
                await read(stream)
        ended.set()

    async with trio.open_nursery() as nursery:
        async with serve(backend) as server:
            nursery.start_soon(follow, server)
            await wait_all_tasks_blocked()
        assert backend.closed
        await ended.wait()
        with pytest.raises(ServerClosingError):
            await server.complete("too late")
        with pytest.raises(ServerClosingError):
            await server.status()


async def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    backend = ScriptedBackend()
    with pytest.raises(ZeroDivisionError):
        async with serve(backend):
            raise ZeroDivisionError
    assert backend.closed


async def test_a_server_is_entered_once() -> None:
    async with serve() as server:
        pass
    with pytest.raises(RuntimeError, match="only once"):
        await server.__aenter__()


# -- loading


async def test_a_model_that_cannot_be_loaded() -> None:
    def load(config: Config, *, progress: object = None) -> Backend:
        raise ModelLoadError("no such file")

    with pytest.raises(ModelLoadError, match="no such file"):
        async with Server(load=load):
            raise AssertionError("unreachable")


@pytest.mark.parametrize("too_late", [False, True])
async def test_loading_can_be_cancelled(too_late: bool) -> None:
    loading, cancelled = threading.Event(), threading.Event()
    backend = ScriptedBackend()

    def load(config: Config, *, progress: Callable[[float], bool]) -> Backend:
        progress(0.5)
        loading.set()
        if too_late:
            cancelled.wait()
            return backend  # it must be freed
        try:
            while progress(0.5):
                pass
        finally:
            backend.close()
        raise AssertionError("unreachable")

    async def cancel_when_loading(scope: trio.CancelScope) -> None:
        await trio.to_thread.run_sync(loading.wait)
        scope.cancel()
        cancelled.set()

    async with trio.open_nursery() as nursery:
        server = Server(load=load)
        nursery.start_soon(cancel_when_loading, nursery.cancel_scope)
        async with server:
            raise AssertionError("unreachable")
    assert backend.closed


async def test_the_thread_is_joined() -> None:
    backend = ScriptedBackend()
    async with Server(load=scripted(backend)) as server:
        names = [thread.name for thread in threading.enumerate()]
        assert "trioserve-engine" in names
        assert (await server.complete("hi")).text == "HI"
    assert backend.closed
    assert "trioserve-engine" not in [thread.name for thread in threading.enumerate()]


async def test_an_unknown_strategy_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="strategy"):
        async with serve(strategy="magic"):
            pass


async def test_other_machines_need_a_process_of_their_own() -> None:
    with pytest.raises(ConfigError, match="use the command, or ChildModels"):
        async with Server(Config(rpc=("10.0.0.1:50052",))):
            raise AssertionError("unreachable")
