"""A server whose engine has failed, or whose step takes too long."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import attrs
import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.broken_strategies import SECRET
from tests.support.scripted_server import read, serve
from tests.support.waiting import patiently
from trioserve.config import Config
from trioserve.engine.loop import EngineLoop
from trioserve.errors import EngineError, UnavailableError
from trioserve.server import Server
from trioserve.testing import ScriptedBackend, scripted

RAISES = "tests.support.broken_strategies:Raises"

# -- an engine that has failed


def explode(backend: ScriptedBackend) -> None:
    raise RuntimeError(SECRET)


async def test_a_failure_is_logged_once_and_ends_every_request() -> None:
    backend = ScriptedBackend(lambda prompt: "x" * 100)
    async with serve(backend, strategy=RAISES) as server:
        with capture_logs() as logs:
            async with trio.open_nursery() as nursery:

                async def fail(prompt: str) -> None:
                    with pytest.raises(EngineError, match="failed"):
                        await server.complete(prompt)

                for prompt in ("a", "b", "c"):  # the third one waits for a slot
                    nursery.start_soon(fail, prompt)
            for _ in range(3):
                with pytest.raises(EngineError) as caught:
                    await server.complete("d")
            await wait_all_tasks_blocked()
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert SECRET not in caught.value.message
    with_traceback = [line for line in logs if line.get("exc_info")]
    assert [line["event"] for line in with_traceback] == ["the engine has failed"]
    assert with_traceback[0]["exc_info"] is caught.value.__cause__


async def test_a_server_whose_engine_has_failed_is_neither_ready_nor_live() -> None:
    backend = ScriptedBackend()
    backend.on_decode = explode
    async with serve(backend) as server:
        lifecycle = server.lifecycle
        lifecycle.check_ready()
        lifecycle.check_live()
        with pytest.raises(EngineError):
            await server.complete("a")
        for check in (lifecycle.check_ready, lifecycle.check_live):
            with pytest.raises(UnavailableError, match=r"^The inference engine failed\.$"):
                check()
        assert len((await server.status()).slots) == 2, "what was last known"
        await server.drain()


async def test_commands_behind_one_that_breaks_the_engine_are_not_lost() -> None:
    stop = threading.Event()

    @asynccontextmanager
    async def by_hand(loop: EngineLoop) -> AsyncIterator[None]:
        try:
            yield
        finally:
            assert stop.is_set()
            loop.stop()
            loop.run()

    backend = ScriptedBackend()
    async with Server(Config(), load=scripted(backend), drive=by_hand) as server:
        loop = server.lifecycle.services.loop

        def break_it() -> None:
            raise RuntimeError(SECRET)

        async def fail(prompt: str) -> None:
            with pytest.raises(EngineError):
                await server.complete(prompt)

        with patiently():
            async with trio.open_nursery() as nursery:
                nursery.start_soon(fail, "before")
                await wait_all_tasks_blocked()
                loop.call(break_it)
                nursery.start_soon(fail, "behind")
                await wait_all_tasks_blocked()
                loop.step()
        stop.set()
    assert backend.closed, "the stop came through"


async def test_a_thread_that_dies_ends_what_waits_for_it() -> None:
    """A panic in Rust is not even an `Exception`."""

    class Panic(BaseException):
        pass

    def panic(backend: ScriptedBackend) -> None:
        raise Panic(SECRET)

    backend = ScriptedBackend()
    backend.on_decode = panic
    with patiently():
        async with Server(Config(), load=scripted(backend)) as server:
            for _ in range(2):
                with pytest.raises(EngineError):
                    await server.complete("a")
            await server.status()
            with pytest.raises(UnavailableError):
                server.lifecycle.check_live()
    assert backend.closed


# -- steps that take too long


@attrs.define
class Blocked:
    """A server whose inference thread is in a step that does not end before `free` is set."""

    server: Server
    free: threading.Event
    request: trio.Event  # that has ended

    async def until_freed(self) -> None:
        self.free.set()
        await self.request.wait()


@asynccontextmanager
async def blocked(**config: object) -> AsyncIterator[Blocked]:
    entered, free, ended = threading.Event(), threading.Event(), trio.Event()

    def hold(backend: ScriptedBackend) -> None:
        entered.set()
        free.wait(10)

    backend = ScriptedBackend()
    backend.on_decode = hold

    async def ask(server: Server) -> None:
        assert (await server.complete("a")).text == "A"
        ended.set()

    async with (
        Server(Config(**config), load=scripted(backend)) as server,
        trio.open_nursery() as nursery,
    ):
        await _settle(server)
        nursery.start_soon(ask, server)
        await trio.to_thread.run_sync(entered.wait)
        try:
            yield Blocked(server, free, ended)
        finally:
            free.set()


async def _settle(server: Server) -> None:
    """Let the watchdog have its first look, which the inference thread answers before ours."""
    await wait_all_tasks_blocked()
    await server.status()
    await wait_all_tasks_blocked()


async def test_a_step_that_takes_too_long(mock_clock: MockClock) -> None:
    with capture_logs() as logs:
        async with blocked(watchdog_timeout=120) as at:
            lifecycle = at.server.lifecycle
            mock_clock.jump(15)  # the watchdog looks
            await wait_all_tasks_blocked()
            mock_clock.jump(119)
            await wait_all_tasks_blocked()
            lifecycle.check_live()
            mock_clock.jump(2)
            await wait_all_tasks_blocked()
            with pytest.raises(UnavailableError, match="longer than 120 seconds"):
                lifecycle.check_live()
            lifecycle.check_ready()
            status = await at.server.status()  # without any waiting
            assert [slot.state for slot in status.slots] == ["idle", "idle"]
            await at.until_freed()
            while True:  # the engine tells so
                try:
                    lifecycle.check_live()
                    break
                except UnavailableError:
                    await trio.lowlevel.checkpoint()
    warned = [line for line in logs if line["log_level"] in ("warning", "error")]
    assert [line["event"] for line in warned] == [
        "a step takes too long",
        "the long step has ended",
    ]
    assert warned[0]["seconds"] == 120
    assert "free.wait(10)" in warned[0]["stack"]
    assert warned[1]["seconds"] >= 120


async def test_without_a_watchdog_no_step_takes_too_long(mock_clock: MockClock) -> None:
    async with blocked(watchdog_timeout=0) as at:
        mock_clock.jump(100_000)
        await wait_all_tasks_blocked()
        at.server.lifecycle.check_live()
        await at.until_freed()


async def test_a_look_does_not_wait_for_a_long_step(mock_clock: MockClock) -> None:
    async with blocked() as at, trio.open_nursery() as nursery:
        looks = []

        async def look() -> None:
            looks.append(await at.server.status())

        nursery.start_soon(look)
        await wait_all_tasks_blocked()
        assert not looks
        mock_clock.jump(5)
        await wait_all_tasks_blocked()
        assert len(looks) == 1
        await at.until_freed()


async def test_time_between_two_steps_is_no_long_step(autojump_clock: MockClock) -> None:
    async with serve(watchdog_timeout=1) as server, server.stream_complete("hello") as stream:
        await trio.sleep(100)
        server.lifecycle.check_live()
        assert await read(stream) == "HELLO"
