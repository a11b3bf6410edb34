"""A server that frees its model's memory while it has no requests.

The engine is stepping on the event loop. Time stands still unless a test moves it: loading is in a
thread, during which a clock that jumps would jump.
"""

from __future__ import annotations

import math
from functools import partial

import pytest
import trio
from structlog.testing import capture_logs
from trio.testing import MockClock, wait_all_tasks_blocked

from tests.support.scripted_server import ScriptedLoader, assert_at_rest, read
from tests.support.sleepers import falling_awake, n_loads, no_collection, until, wake
from trioserve.concurrency import Phase
from trioserve.config import Config
from trioserve.errors import ConfigError, EngineError, InvalidRequestError, ServerClosingError
from trioserve.server import Server
from trioserve.server.lifecycle.sleep import ServerState
from trioserve.testing import ScriptedBackend, stepping

__all__ = ["no_collection"]


# -- when it sleeps


async def test_it_sleeps_when_it_was_idle_for_long_enough(mock_clock: MockClock) -> None:
    loader = ScriptedLoader()
    async with loader.serve(sleep_idle_seconds=10) as server:
        mock_clock.jump(9)
        assert (await server.complete("hi")).text == "HI"
        mock_clock.jump(9.9)
        await wait_all_tasks_blocked()
        assert not server.lifecycle.sleeping
        assert server.lifecycle.ready
        mock_clock.jump(0.2)
        await until(server, ServerState.SLEEPING)
        assert server.lifecycle.sleeping
        assert not server.lifecycle.ready
        assert loader.backends[0].closed
        assert (await server.complete("ho")).text == "HO"
        assert not server.lifecycle.sleeping
        assert n_loads(loader) == 2
        await assert_at_rest(server)
    assert loader.backends[1].closed


async def test_the_log_says_when_it_sleeps_and_wakes() -> None:
    with capture_logs() as logs:
        async with ScriptedLoader().serve() as server:
            assert logs == []
            await server.sleep()
            assert [one["event"] for one in logs] == ["asleep"]
            await wake(server)
        assert [one["event"] for one in logs] == ["asleep", "awake"]  # and nothing at its end
    assert {one["model"] for one in logs} == {"scripted"}


async def test_by_default_it_does_not(mock_clock: MockClock) -> None:
    async with ScriptedLoader().serve() as server:
        mock_clock.jump(10**9)
        await wait_all_tasks_blocked()
        assert not server.lifecycle.sleeping


@pytest.mark.parametrize("seconds", [0, -0.5, -2, math.inf])
def test_what_is_no_time_to_sleep_after(seconds: float) -> None:
    with pytest.raises(ConfigError, match="sleep_idle_seconds"):
        Config(sleep_idle_seconds=seconds)


async def test_requests_in_flight_are_not_cut(mock_clock: MockClock) -> None:
    loader = ScriptedLoader()
    async with loader.serve(sleep_idle_seconds=1, stall_timeout=1e6) as server:
        async with server.stream_complete("hello") as stream:
            mock_clock.jump(100)
            await wait_all_tasks_blocked()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(server.sleep)
                await wait_all_tasks_blocked()
                assert await read(stream) == "HELLO"
                await wait_all_tasks_blocked()
                assert not server.lifecycle.sleeping  # the stream is still open
                nursery.cancel_scope.cancel()
        assert n_loads(loader) == 1


async def test_a_program_keeps_it_awake(mock_clock: MockClock) -> None:
    async with ScriptedLoader().serve(sleep_idle_seconds=1) as server:
        async with server.loaded():
            mock_clock.jump(100)
            await wait_all_tasks_blocked()
            assert await server.detokenize([104, 105]) == "hi"
        mock_clock.jump(2)
        await until(server, ServerState.SLEEPING)
        async with server.loaded(keep_alive=5):
            assert await server.detokenize([104, 105]) == "hi"
        with pytest.raises(InvalidRequestError, match="'temperature' is not a parameter"):
            async with server.loaded(temperature=1):
                raise AssertionError("unreachable")


async def test_a_look_at_it_does_not_count(mock_clock: MockClock) -> None:
    async with ScriptedLoader().serve(sleep_idle_seconds=10) as server:
        for _ in range(3):
            mock_clock.jump(3)
            await server.status()
            assert not server.lifecycle.sleeping
        mock_clock.jump(1.1)
        await until(server, ServerState.SLEEPING)


# -- told to sleep, and to wake


async def test_it_is_told_to_sleep_and_to_wake(mock_clock: MockClock) -> None:
    loader = ScriptedLoader()
    async with loader.serve() as server:
        await server.sleep()
        assert server.lifecycle.sleeping
        await server.sleep()
        await wake(server)
        assert not server.lifecycle.sleeping
        await wake(server)
        assert n_loads(loader) == 2
    await server.sleep()  # the memory is free


async def test_it_sleeps_when_what_runs_is_done(mock_clock: MockClock) -> None:
    async with ScriptedLoader().serve() as server, trio.open_nursery() as nursery:
        async with server.stream_complete("hello") as stream:
            nursery.start_soon(server.sleep)
            await wait_all_tasks_blocked()
            assert (await server.complete("others may come")).text == "OTHERS MAY COME"
            assert await read(stream) == "HELLO"
            assert not server.lifecycle.sleeping
        await until(server, ServerState.SLEEPING)


# -- keep_alive


async def test_a_request_says_how_long_it_stays_awake(mock_clock: MockClock) -> None:
    loader = ScriptedLoader()
    async with loader.serve(sleep_idle_seconds=10) as server:
        await server.complete("a", keep_alive=100)
        await server.complete("b")  # as the last one said
        mock_clock.jump(99)
        await wait_all_tasks_blocked()
        assert not server.lifecycle.sleeping
        mock_clock.jump(2)
        await until(server, ServerState.SLEEPING)
        await server.chat([{"role": "user", "content": "c"}])  # and now as the configuration says
        mock_clock.jump(11)
        await until(server, ServerState.SLEEPING)
    assert n_loads(loader) == 2


async def test_it_sleeps_right_after_a_request(mock_clock: MockClock) -> None:
    async with ScriptedLoader().serve() as server:
        assert (await server.complete("a", keep_alive=0)).text == "A"
        await until(server, ServerState.SLEEPING)


@pytest.mark.parametrize("seconds", [-1, -0.5, math.inf])
async def test_it_stays_awake_for_ever(mock_clock: MockClock, seconds: float) -> None:
    async with ScriptedLoader().serve(sleep_idle_seconds=1) as server:
        async with server.loaded(keep_alive=seconds):
            pass
        mock_clock.jump(10**9)
        await wait_all_tasks_blocked()
        assert not server.lifecycle.sleeping


# -- the end


async def test_drain_while_it_sleeps() -> None:
    loader = ScriptedLoader()
    async with loader.serve() as server:
        await server.sleep()
        await server.drain()
        assert server.lifecycle.gate.phase.value is not Phase.OPEN
        for call in (lambda: server.complete("a"), partial(wake, server)):
            with pytest.raises(ServerClosingError):
                await call()
        with pytest.raises(ServerClosingError):
            server.lifecycle.check_ready()
    assert loader.n_begun == 1
    with pytest.raises(ServerClosingError):
        await server.status()
    with pytest.raises(ServerClosingError):
        _ = server.lifecycle.services


async def test_what_has_begun_does_not_wake_it_while_it_drains() -> None:
    loader = ScriptedLoader()
    async with loader.serve() as server:
        await server.sleep()
        await server.drain()
        with server.lifecycle.gate.inside(has_begun=True), pytest.raises(ServerClosingError):
            await server.complete("a")
    assert loader.n_begun == 1


async def test_drain_while_it_wakes(mock_clock: MockClock) -> None:
    async def ask() -> None:
        with pytest.raises(ServerClosingError):
            await server.complete("a")

    async with falling_awake() as (server, loader):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await wait_all_tasks_blocked()
            await server.drain()
        loader.may_go_on.set()
        await until(server, ServerState.READY)
        await ask()


async def test_leaving_it_while_it_wakes_gives_up_loading(mock_clock: MockClock) -> None:
    async def ask(server: Server) -> None:
        with pytest.raises(ServerClosingError):
            await server.complete("a")

    loader = ScriptedLoader()
    async with trio.open_nursery() as nursery:
        async with loader.serve() as server:
            await server.sleep()
            loader.may_go_on.clear()
            nursery.start_soon(ask, server)
            await wait_all_tasks_blocked()
        assert server.state is ServerState.CLOSED
    assert (loader.n_begun, n_loads(loader)) == (2, 1)


async def test_the_failure_of_a_later_engine_is_seen() -> None:
    loader = ScriptedLoader()
    async with loader.serve() as server:
        await server.sleep()
        await wake(server)

        def fail(backend: ScriptedBackend) -> None:
            raise ZeroDivisionError

        loader.backends[1].on_decode = fail
        with pytest.raises(EngineError):
            await server.complete("a")
        assert isinstance((await server.lifecycle.wait_failure()).__cause__, ZeroDivisionError)
        # Another engine is another chance.
        await server.sleep()
        assert (await server.complete("a")).text == "A"


async def test_an_unexpected_failure_to_wake_ends_the_block() -> None:
    loads = 0

    def load(config: Config, *, progress: object = None) -> ScriptedBackend:
        nonlocal loads
        loads += 1
        return ScriptedBackend() if loads == 1 else {}["a mistake"]  # type: ignore[index]

    with pytest.RaisesGroup(pytest.RaisesExc(KeyError), flatten_subgroups=True):
        async with Server(Config(), load=load, drive=stepping) as server:
            await server.sleep()
            with pytest.raises((ServerClosingError, trio.Cancelled)) as caught:
                await server.complete("a")
            raise caught.value
    with pytest.raises(ServerClosingError):
        await server.complete("a")
