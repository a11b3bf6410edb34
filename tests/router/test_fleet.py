"""A fleet of scripted processes: who gets which, and its end."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from contextvars import ContextVar

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.cancellation import CancelAtStep
from tests.support.scripted_children import (
    ScriptedCatalog,
    ScriptedLauncher,
    ScriptedProcess,
    entry,
)
from tests.support.scripted_fleet import A, B, C, fleet_of, requests_of, status_of
from tests.support.waiting import until
from trioserve.children.reports import Loading, Ready
from trioserve.errors import (
    ConfigError,
    InvalidRequestError,
    ModelFailedError,
    ModelLoadError,
    ModelNotLoadedError,
    ServerClosingError,
    TrioServeError,
    UnknownModelError,
)
from trioserve.llama.machine import MemoryUse
from trioserve.router.states import MAX_DEATHS, WINDOW, FleetEvent, QueueStatus, Status

# -- starting and giving way


async def test_a_request_starts_the_process_of_its_model_and_the_next_one_uses_it() -> None:
    launcher = ScriptedLauncher()
    async with fleet_of(launcher) as fleet:
        assert status_of(fleet, "a") is Status.UNLOADED
        async with fleet.use(A) as child:
            assert child.pid == launcher.last("a").pid
            state = fleet.state("a")
            assert (state.value, state.n_requests, state.pid) == (Status.LOADED, 1, child.pid)
            assert state.args == A.args
        async with fleet.use(A) as again:
            assert again is child
        assert fleet.state("a").last_used is not None
    assert not launcher.running
    assert all(one.closed for one in launcher.started)


async def test_the_least_recently_used_model_is_stopped_and_a_busy_one_is_not() -> None:
    launcher = ScriptedLauncher()
    async with fleet_of(launcher, max_models=2) as fleet, requests_of(fleet) as requests:
        busy = await requests.begin("a")
        idle = await requests.begin("b")
        idle.end()
        third = await requests.begin("c")
        assert launcher.running == ["a", "c"]
        assert launcher.last("b").signals == [signal.SIGTERM]
        fourth = await requests.begin("b")
        assert fourth.child is None, "two are in use"
        third.end()
        await wait_all_tasks_blocked()
        assert fourth.child is not None
        assert launcher.running == ["a", "b"] and busy.child is not None


async def test_a_process_that_does_not_end_is_killed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    launcher = ScriptedLauncher(obeys=False)
    async with fleet_of(launcher, max_models=1) as fleet:
        async with fleet.use(A):
            pass
        began = trio.current_time()
        async with fleet.use(B):
            assert trio.current_time() - began == A.stop_timeout
        assert launcher.last("a").signals == [signal.SIGTERM, signal.SIGKILL]


async def test_those_who_wait_are_told_their_place_and_the_progress(
    autojump_clock: trio.testing.MockClock,
) -> None:
    launcher = ScriptedLauncher(ready=False)
    async with fleet_of(launcher, max_models=1) as fleet, requests_of(fleet) as requests:
        first, second = await requests.begin("a"), await requests.begin("b")
        third = await requests.begin("b")
        assert second.waited == [QueueStatus(position=0, status=Status.UNLOADED)]
        assert third.waited[-1] == QueueStatus(position=1, status=Status.UNLOADED)
        launcher.last("a").say(Loading(0.5))
        await trio.sleep(1)
        assert first.waited[-1] == QueueStatus(position=0, status=Status.LOADING, progress=0.5)
        launcher.last("a").say(Ready())
        await wait_all_tasks_blocked()
        first.end()
        await trio.sleep(1)
        assert third.waited[-1] == QueueStatus(position=1, status=Status.LOADING)


async def test_without_autoload_only_what_runs_is_used() -> None:
    async with fleet_of(ScriptedLauncher()) as fleet:
        with pytest.raises(ModelNotLoadedError, match="'a' is not loaded"):
            async with fleet.use(A, autoload=False):
                raise AssertionError
        async with fleet.use(A):
            pass
        async with fleet.use(A, autoload=False) as child:
            assert child.pid is not None


REQUEST: ContextVar[str] = ContextVar("REQUEST", default="none")


async def test_what_is_started_for_a_request_does_not_belong_to_it() -> None:
    """Its log lines would name that request for as long as the process runs."""
    requests = []

    class Launcher(ScriptedLauncher):
        async def launch(self, argv: Sequence[str]) -> ScriptedProcess:
            requests.append(REQUEST.get())
            return await super().launch(argv)

    async with fleet_of(Launcher(needs={"a": 1}), max_memory=1) as fleet:
        REQUEST.set("first")
        async with fleet.use(A):
            assert requests == ["none", "none"]


# -- memory


async def test_a_model_is_started_when_its_memory_is_there() -> None:
    launcher = ScriptedLauncher(needs={"a": 6, "b": 6})
    async with fleet_of(launcher, max_memory=10) as fleet, requests_of(fleet) as requests:
        first, second = await requests.begin("a"), await requests.begin("b")
        assert first.child is not None and second.child is None
        assert fleet.state("a").memory == 6
        first.end()
        await wait_all_tasks_blocked()
        assert second.child is not None and launcher.running == ["b"]
        third = await requests.begin("c")
        assert (
            isinstance(third.error, ModelLoadError)
            and third.error.message == "The file is not a model."
        )


async def test_measured_memory_decides_and_is_shown(
    autojump_clock: trio.testing.MockClock,
) -> None:
    """A model that waits starts once others of the machine have freed what it needs."""
    launcher, free = ScriptedLauncher(needs={"a": 6, "b": 6, "c": 1}), 8
    asked: list[Sequence[int]] = []

    async def measured(pids: Sequence[int]) -> MemoryUse:
        await trio.lowlevel.checkpoint()
        asked.append(pids)
        return MemoryUse(free, dict.fromkeys(pids, (3, 2)))

    fleet = fleet_of(launcher, max_memory=-1, measure=measured)
    async with fleet, requests_of(fleet) as requests:
        first = await requests.begin("a")
        await trio.sleep(5)
        assert first.child is not None and asked[-1] == [first.child.pid]
        state = fleet.state("a")
        assert (state.memory, state.memory_used, state.memory_gpus) == (6, 3, ())
        free = 9  # the first will still take 4 of it
        second = await requests.begin("b")
        await trio.sleep(5)
        assert second.child is None and launcher.running == ["a"]
        free = 10
        await trio.sleep(5)
        assert second.child is not None and launcher.running == ["a", "b"]
        first.end()
        await trio.sleep(1)
        free = 8
        third = await requests.begin("c")
        await trio.sleep(5)
        assert third.child is not None and launcher.running == ["b", "c"], "the idle one went"


async def test_a_model_whose_estimate_fails_is_not_tried_again_by_each_request(
    autojump_clock: trio.testing.MockClock,
) -> None:
    launcher = ScriptedLauncher(needs={})
    async with fleet_of(launcher, max_memory=10) as fleet, requests_of(fleet) as requests:
        for _ in range(MAX_DEATHS):
            launcher.n_estimates = 0
            failed = await requests.begin("a")
            assert isinstance(failed.error, TrioServeError) and launcher.n_estimates == 1
        refused = await requests.begin("a")
        assert isinstance(refused.error, ModelFailedError) and launcher.n_estimates == 1
        assert "The file is not a model." in refused.error.message
        launcher.needs = {"a": 5}
        await trio.sleep(WINDOW)
        assert (await requests.begin("a")).child is not None


async def test_an_unforeseen_error_fails_the_process_that_it_is_of_alone() -> None:
    class Launcher(ScriptedLauncher):
        async def launch(self, argv: Sequence[str]) -> ScriptedProcess:
            if "/models/a.gguf" in argv:
                raise OSError(5, "Input/output error")
            return await super().launch(argv)

    launcher = Launcher(needs={"b": 1})
    for max_memory in (0, 10):
        async with (
            fleet_of(launcher, max_memory=max_memory) as fleet,
            requests_of(fleet) as requests,
        ):
            failed, other = await requests.begin("a"), await requests.begin("b")
            assert failed.error is not None and failed.error.status in (500, 503)
            assert other.child is not None and other.error is None


# -- what others ask for


async def test_load_and_unload() -> None:
    launcher = ScriptedLauncher()
    async with fleet_of(launcher) as fleet:
        with fleet.events.subscribe() as events:
            await fleet.load(A)
            with pytest.raises(InvalidRequestError, match="running already"):
                await fleet.load(A)
            await wait_all_tasks_blocked()
            assert status_of(fleet, "a") is Status.LOADED
            await fleet.unload(A)
            await wait_all_tasks_blocked()
            assert status_of(fleet, "a") is Status.UNLOADED
            state = fleet.state("a")
            assert (state.failed, state.exit_code) == (False, 0)
            with pytest.raises(InvalidRequestError, match="is not running"):
                await fleet.unload(A)
            told = [await anext(events) for _ in range(3)]
    assert [one.model for one in told] == ["a"] * 3
    assert {one.event for one in told} == {"status_change"}
    assert [one.data for one in told] == [
        {"status": "loading"},
        {"status": "loaded"},
        {"status": "unloaded", "exit_code": 0},
    ]


async def test_to_unload_a_model_that_loads_refuses_those_who_wait() -> None:
    launcher = ScriptedLauncher(ready=False)
    async with fleet_of(launcher) as fleet, requests_of(fleet) as requests:
        waiting = await requests.begin("a")
        await fleet.unload(A)
        await wait_all_tasks_blocked()
        assert waiting.error is not None and "was unloaded" in waiting.error.message
        assert launcher.last("a").signals == [signal.SIGKILL]
        assert not fleet.state("a").failed


async def test_models_are_loaded_on_startup() -> None:
    launcher = ScriptedLauncher()
    catalog = ScriptedCatalog(A, entry("early", load_on_startup=True))
    async with fleet_of(launcher, catalog=catalog, max_models=1):
        await wait_all_tasks_blocked()
        assert launcher.running == ["early"]
    catalog = ScriptedCatalog(*(entry(name, load_on_startup=True) for name in "xy"))
    with pytest.raises(ConfigError, match="2 models are to be loaded"):
        async with fleet_of(launcher, catalog=catalog, max_models=1):
            raise AssertionError


async def test_a_system_without_unix_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    with pytest.raises(ConfigError, match="Unix sockets"):
        async with fleet_of(ScriptedLauncher()):
            raise AssertionError


async def test_a_reload_stops_what_has_changed_or_is_gone() -> None:
    launcher = ScriptedLauncher()
    catalog = ScriptedCatalog(A, B, C)
    async with fleet_of(launcher, catalog=catalog) as fleet, requests_of(fleet) as requests:
        with fleet.events.subscribe() as events:
            for name in "abc":
                (await requests.begin(name)).end()
            await wait_all_tasks_blocked()
            catalog.next = {"b": entry("b", stop_timeout=3.0), "c": C}
            await fleet.reload()
            assert launcher.running == ["c"]
            assert status_of(fleet, "a") is Status.UNLOADED
            async with fleet.use(catalog.entries["b"]) as child:
                assert child.pid == launcher.last("b").pid
            told = [await anext(events) for _ in range(len(events))]
    assert FleetEvent(model="*", event="models_reload") in told


async def test_who_waits_for_a_model_that_is_gone_is_told() -> None:
    launcher = ScriptedLauncher(ready=False)
    catalog = ScriptedCatalog(A, B)
    async with fleet_of(launcher, catalog=catalog) as fleet, requests_of(fleet) as requests:
        gone, kept = await requests.begin("a"), await requests.begin("b")
        catalog.next = {"b": entry("b", stop_timeout=3.0)}
        await fleet.reload()
        await wait_all_tasks_blocked()
        assert isinstance(gone.error, UnknownModelError)
        launcher.last("b").say(Ready())
        await wait_all_tasks_blocked()
        assert kept.child is not None and len(launcher.started) == 3


async def test_a_model_that_is_gone_as_its_process_dies_is_not_started_again() -> None:
    launcher = ScriptedLauncher(needs={"a": 1, "b": 1})
    catalog = ScriptedCatalog(A, B)
    async with fleet_of(launcher, catalog=catalog, max_memory=10) as fleet:
        async with fleet.use(A):
            pass
        dying = launcher.last("a")
        dying.die(1)
        await wait_all_tasks_blocked()
        catalog.next = {"b": B}
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.reload)
            await until(lambda: fleet.state("a").pid is None)
            dying.fall_silent()
        with pytest.raises(InvalidRequestError, match="not running"):
            await fleet.unload(A)  # so nothing that waits for its place holds up others


# -- the end


async def test_a_drain_lets_requests_finish_and_refuses_those_who_wait() -> None:
    launcher = ScriptedLauncher(obeys=False)
    async with fleet_of(launcher, max_models=1) as fleet, requests_of(fleet) as requests:
        running, waiting = await requests.begin("a"), await requests.begin("b")
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fleet.drain)
            await wait_all_tasks_blocked()
            assert isinstance(waiting.error, ServerClosingError)
            assert isinstance((await requests.begin("c")).error, ServerClosingError)
            assert launcher.last("a").signals == [] and running.error is None
            running.end()
            await wait_all_tasks_blocked()
            assert launcher.last("a").signals == [signal.SIGTERM]
            launcher.last("a").end(0)
        with pytest.raises(ServerClosingError):
            await fleet.load(A)


async def test_a_drain_ends_in_any_case(autojump_clock: trio.testing.MockClock) -> None:
    launcher = ScriptedLauncher(obeys=False)
    async with fleet_of(launcher) as fleet, fleet.use(A):
        began = trio.current_time()
        await fleet.drain()
        assert trio.current_time() - began == 35
        assert not launcher.running


async def test_an_error_in_the_block_comes_out_as_it_is() -> None:
    launcher = ScriptedLauncher()
    with pytest.raises(ZeroDivisionError):
        async with fleet_of(launcher) as fleet, fleet.use(A):
            raise ZeroDivisionError
    assert not launcher.running


@pytest.mark.parametrize("max_memory", [0, 10])
async def test_a_request_that_is_cancelled_anywhere_leaves_nothing(max_memory: int) -> None:
    launcher = ScriptedLauncher(needs={"a": 5})
    n_cancelled = 0
    async with fleet_of(launcher, max_memory=max_memory) as fleet:

        async def use() -> None:
            async with fleet.use(A, on_wait=lambda status: None) as child:
                await trio.lowlevel.checkpoint()
                assert child.n_users == 1

        for n in range(1, 50):
            canceller = CancelAtStep(n)
            await canceller.run(use)
            await wait_all_tasks_blocked()
            state = fleet.state("a")
            assert (state.n_requests, state.n_waiting) == (0, 0)
            if not canceller.scope.cancelled_caught:
                break
            n_cancelled += 1
            if fleet.state("a").pid is not None:
                await fleet.unload(A)
                await wait_all_tasks_blocked()
    assert n_cancelled > 1


@pytest.mark.parametrize("was_ready", [False, True])
async def test_a_fleet_that_is_cancelled_anywhere_leaves_no_process(was_ready: bool) -> None:
    n_cancelled = 0
    for n in range(1, 100):
        launcher = ScriptedLauncher(ready=was_ready)
        canceller = CancelAtStep(n)

        async def use(launcher: ScriptedLauncher = launcher) -> None:
            async with fleet_of(launcher) as fleet:
                await fleet.load(A)
                await wait_all_tasks_blocked()

        await canceller.run(use)
        assert not launcher.running and all(one.closed for one in launcher.started)
        if not canceller.scope.cancelled_caught:
            break
        n_cancelled += 1
    assert n_cancelled > 3


async def test_a_fleet_that_is_cancelled_refuses_what_comes() -> None:
    launcher = ScriptedLauncher()
    with trio.CancelScope() as scope:
        async with fleet_of(launcher) as fleet:
            scope.cancel()
            with trio.CancelScope(shield=True):
                await wait_all_tasks_blocked()
                with pytest.raises(ServerClosingError):
                    await fleet.load(A)
    assert scope.cancelled_caught
