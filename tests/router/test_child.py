"""Scripted processes that fail, die, hang or say what nobody understands."""

from __future__ import annotations

import math
import signal
import socket
from collections.abc import Awaitable, Callable
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.scripted_children import ScriptedLauncher
from tests.support.scripted_fleet import A, fleet_of, requests_of, status_of
from trioserve.children.frames import framed
from trioserve.children.parent import ParentSocket
from trioserve.children.reports import Failed, Ready, Sleeping
from trioserve.cli.progress import Reporter
from trioserve.cli.serving import _tell_usage
from trioserve.errors import (
    ModelFailedError,
    ModelLoadError,
    ModelProcessError,
    TrioServeError,
    UnavailableError,
)
from trioserve.model_process.connection import Line
from trioserve.router.states import MAX_DEATHS, WINDOW, Status
from trioserve.server.usage import Usage
from trioserve.store.usage import UsageRow, Used


async def test_a_model_that_cannot_be_loaded_is_an_error_for_all_who_wait() -> None:
    launcher = ScriptedLauncher(ready=False)
    async with fleet_of(launcher) as fleet, requests_of(fleet) as requests:
        waiting = [await requests.begin("a") for _ in range(2)]
        launcher.last("a").say(Failed("The file is cut short."))
        launcher.last("a").end(1)
        await wait_all_tasks_blocked()
        for one in waiting:
            assert isinstance(one.error, ModelLoadError)
            assert one.error.message == "The file is cut short."
        assert waiting[0].error is not waiting[1].error
        state = fleet.state("a")
        assert (state.value, state.failed, state.exit_code) == (Status.UNLOADED, True, 1)
        assert state.message == "The file is cut short."
        assert not launcher.running, "no request waits for it"


async def test_a_process_that_says_nothing_has_the_end_of_its_log_told() -> None:
    launcher = ScriptedLauncher(ready=False)
    async with fleet_of(launcher) as fleet, requests_of(fleet) as requests:
        waiting = await requests.begin("a")
        launcher.last("a").write('{"level": "info", "event": "listening", "url": "x"}\nGGML_ASSERT')
        launcher.last("a").end(-6)
        await wait_all_tasks_blocked()
        assert waiting.error is not None
        assert "was ended by SIGABRT: GGML_ASSERT" in waiting.error.message
        assert fleet.state("a").log_tail == ("listening url=x", "GGML_ASSERT")


GDB = """\
/build/ggml.c:42: GGML_ASSERT(n_dims <= 4) failed
[New LWP 4242]
#0  0x00007f0b in wait4 () from /lib/libc.so.6
[Inferior 1 (process 4241) detached]
"""


async def test_a_debugger_does_not_hide_why_llama_cpp_has_aborted() -> None:
    launcher = ScriptedLauncher(ready=False)
    async with fleet_of(launcher) as fleet, requests_of(fleet) as requests:
        waiting = await requests.begin("a")
        launcher.last("a").write('{"level": "error", "event": "a metadata key is odd"}\n' + GDB)
        launcher.last("a").end(-6)
        await wait_all_tasks_blocked()
        assert waiting.error is not None
        assert waiting.error.message == (
            "The process of the model 'a' was ended by SIGABRT: /build/ggml.c:42: "
            "GGML_ASSERT(n_dims <= 4) failed. Its file is /models/a.gguf."
        )


async def test_what_cannot_be_started_is_an_error() -> None:
    async with fleet_of(ScriptedLauncher(refuses="Too many files are open.")) as fleet:
        with pytest.raises(ModelLoadError, match="Too many files"):
            async with fleet.use(A):
                raise AssertionError
        assert fleet.state("a").failed


async def test_a_process_that_dies_is_started_again_and_others_go_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    launcher = ScriptedLauncher()
    async with fleet_of(launcher) as fleet, requests_of(fleet) as requests:
        hit, other = await requests.begin("a"), await requests.begin("b")
        launcher.last("a").end(-11)
        await wait_all_tasks_blocked()
        assert hit.child is not None and hit.child.ended.is_set()
        assert other.child is not None and not other.child.ended.is_set()
        late = await requests.begin("a")
        assert late.child is None, "not before a while"
        await trio.sleep(1)
        assert late.child is not None and late.child is not hit.child
        assert launcher.running == ["b", "a"]
        hit.end()
        await wait_all_tasks_blocked()
        assert fleet.state("a").n_requests == 1, "the one of the new process"


async def test_a_model_that_is_unloaded_after_it_died_is_not_started_again(
    autojump_clock: trio.testing.MockClock,
) -> None:
    launcher = ScriptedLauncher()
    async with fleet_of(launcher) as fleet, requests_of(fleet) as requests:
        (await requests.begin("a")).end()
        launcher.last("a").end(-11)
        await wait_all_tasks_blocked()
        waiting = await requests.begin("a")
        await fleet.unload(A)
        await trio.sleep(10)
        assert waiting.error is not None and "was unloaded" in waiting.error.message
        assert len(launcher.started) == 1


async def test_a_model_that_dies_too_often_is_not_started_for_a_while(
    autojump_clock: trio.testing.MockClock,
) -> None:
    launcher = ScriptedLauncher()
    async with fleet_of(launcher) as fleet, requests_of(fleet) as requests:
        for _ in range(MAX_DEATHS):
            async with fleet.use(A):
                pass
            launcher.last("a").write("it is broken\n")
            launcher.last("a").end(-11)
            await wait_all_tasks_blocked()
        assert len(launcher.started) == MAX_DEATHS
        refused = await requests.begin("a")
        assert isinstance(refused.error, ModelFailedError)
        assert refused.error.retry_after == WINDOW
        assert "it is broken" in refused.error.message
        assert fleet.state("a").log_tail == ("it is broken",)
        await trio.sleep(WINDOW)
        assert (await requests.begin("a")).child is not None


async def test_a_person_may_load_a_model_that_has_failed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    launcher = ScriptedLauncher(ready=False)
    async with fleet_of(launcher) as fleet, requests_of(fleet) as requests:
        for _ in range(MAX_DEATHS):
            await requests.begin("a")
            launcher.last("a").end(1)
            await wait_all_tasks_blocked()
        launcher.ready = True
        assert isinstance((await requests.begin("a")).error, ModelFailedError)
        await fleet.load(A)
        assert (await requests.begin("a")).child is not None


async def test_a_process_that_dies_as_soon_as_it_is_ready() -> None:
    launcher = ScriptedLauncher(ready=False)
    async with fleet_of(launcher) as fleet, requests_of(fleet) as requests:
        waiting = await requests.begin("a")
        launcher.last("a").say(Ready())
        launcher.last("a").end(-9)
        await wait_all_tasks_blocked()
        assert waiting.child is not None, "its request finds out, as it would a moment later"
        assert waiting.child.ended.is_set()


async def hangs(line: Line) -> None:
    await trio.sleep_forever()


def stuck(error: TrioServeError) -> Callable[[Line], Awaitable[None]]:
    async def ask(line: Line) -> None:
        await trio.lowlevel.checkpoint()
        raise error

    return ask


@pytest.mark.parametrize(
    ("ask", "seconds", "message"),
    [
        (hangs, 2 * (5 + 10), "It does not answer within 10 seconds."),
        (
            stuck(UnavailableError("A step takes long.")),
            10,
            "It says that it is stuck: A step takes long.",
        ),
        (stuck(ModelProcessError("It takes no requests.")), 10, "It takes no requests."),
    ],
)
async def test_a_process_that_hangs_or_is_stuck_is_killed(
    ask: Any, seconds: float, message: str, autojump_clock: trio.testing.MockClock
) -> None:
    async with fleet_of(ScriptedLauncher(), ask=ask) as fleet, fleet.use(A) as child:
        began = trio.current_time()
        await child.ended.wait()
        assert trio.current_time() - began == seconds
        assert child.message == message


async def test_a_process_that_never_says_anything_is_killed(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with fleet_of(ScriptedLauncher(ready=False)) as fleet:
        with pytest.raises(ModelLoadError, match="did not start within 120 seconds"):
            async with fleet.use(A):
                raise AssertionError


@pytest.mark.parametrize(
    "data",
    [
        b"\xff" * 100,
        framed(b"nonsense"),
        framed(msgspec.msgpack.encode({"state": "loading", "progress": math.nan})),
        framed(msgspec.msgpack.encode({"state": "usage", "rows": [["day", "key", -1]]})),
        framed(msgspec.msgpack.encode({"state": "failed", "message": "x" * 2**17})),
        framed(b"\x82\xa5state\xa5ready\xa4more\x81\xa1a" + b"\x91" * 100_000),
    ],
)
async def test_a_socket_that_gives_garbage_ends_the_process(data: bytes) -> None:
    launcher = ScriptedLauncher(ready=False)
    async with fleet_of(launcher) as fleet, requests_of(fleet) as requests:
        waiting = await requests.begin("a")
        launcher.last("a").send(data)
        await wait_all_tasks_blocked()
        assert waiting.error is not None and "socket is broken" in waiting.error.message
        assert launcher.started[0].signals == [signal.SIGKILL]


async def test_what_1500_keys_used_in_a_second_is_told_in_frames_that_are_read() -> None:
    usage, ours, (theirs, end) = Usage(), Usage(), socket.socketpair()
    for i in range(1500):
        usage.add(UsageRow("2026-01-31", f"{i:064}", "m" * 1000), Used(1, 2**62, 3, 2**62, 1e-300))

    launcher = ScriptedLauncher()
    async with fleet_of(launcher) as fleet, fleet.use(A):
        fleet.on_usage = ours.add_reported
        with theirs, end:
            _tell_usage(usage, Reporter(ParentSocket(end)))  # more than the socket takes at once
            assert len(usage.take()) == 0
            while len(ours.totals) < 1500:
                launcher.last("a").send(theirs.recv(2**16))
                await wait_all_tasks_blocked()
        assert launcher.last("a").signals == []
        assert {model for _, model in ours.totals} == {"a"}
        assert [*ours.totals.values()] == [*usage.totals.values()]


async def test_a_model_that_sleeps_is_used_as_any_other() -> None:
    launcher = ScriptedLauncher()
    async with fleet_of(launcher) as fleet:
        async with fleet.use(A):
            pass
        launcher.last("a").say(Sleeping())
        await wait_all_tasks_blocked()
        assert status_of(fleet, "a") is Status.SLEEPING
        async with fleet.use(A):
            launcher.last("a").say(Ready())
            await wait_all_tasks_blocked()
            assert status_of(fleet, "a") is Status.LOADED
