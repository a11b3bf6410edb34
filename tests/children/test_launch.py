"""Real processes, started in both ways: what they are given, and how they end."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio

from tests.support import tiny
from tests.support.processes import all_processes, is_alive, parent_of
from tests.support.waiting import patiently, until
from trioserve.children.child import Child
from trioserve.children.launch import Launcher, Spawner, open_launcher
from trioserve.errors import ModelLoadError

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(sys.platform != "linux", reason="forks are of Linux only"),
]

PR_GET_CHILD_SUBREAPER = 37


@asynccontextmanager
async def started(launcher: Launcher, *argv: str) -> AsyncIterator[tuple[Child, dict[str, Any]]]:
    """A process, with what it says of itself."""
    process = await launcher.launch(argv)
    try:
        yield process, await tiny.info_of(process)
    finally:
        await process.aend()


async def until_gone(pid: int) -> None:
    """Wait until another process is no more, or a zombie."""
    await until(lambda: not is_alive(pid))


def n_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize("way", tiny.WAYS)
async def test_a_process_gets_its_socket_its_log_and_a_session_of_its_own(way: str) -> None:
    async with tiny.launcher(way) as launcher:
        async with started(launcher):
            pass  # so that a zygote is there
        n_before = n_descriptors()
        async with started(launcher, "", "--two words", "é") as (process, info):
            assert info["pid"] == process.pid
            assert info["parent"] == os.getpid()
            assert info["session"] == process.pid
            assert info["argv"] == ["", "--two words", "é"]
            assert info["colour"] == "green"
            # Its standard files, its socket, and what it looks at all of them with.
            assert len(info["descriptors"]) == 5
            assert not os.get_inheritable(process.socket.fileno())
            log = b""
            with patiently():
                while log.count(b"\n") < 2:
                    log += await process.read_log()
            assert log == b"on standard output\non standard error\n"
        assert n_descriptors() == n_before


async def test_ps_shows_what_a_fork_has_become() -> None:
    async with tiny.forks() as launcher:
        async with started(launcher, "--model", "a.gguf") as (_, info):
            assert info["shown"] == ["trioserve", "--model", "a.gguf"]
        async with started(launcher, "x" * 10_000) as (_, info):
            assert info["shown"][0] == "trioserve"
            assert "x" * 10 in info["shown"][1] and len(info["shown"][1]) < 10_000


@pytest.mark.parametrize("way", tiny.WAYS)
async def test_a_process_ends_with_its_exit_code(way: str) -> None:
    async with tiny.launcher(way) as launcher, started(launcher, "exit", "3") as (process, _):
        assert await process.ended() == 3
        assert await process.ended() == 3, "may be asked again"
        process.kill()  # does nothing
        process.terminate()


@pytest.mark.parametrize("way", tiny.WAYS)
async def test_an_end_that_no_descriptor_tells(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open")
    async with tiny.launcher(way) as launcher, started(launcher, "exit", "3") as (process, _):
        assert await process.ended() == 3


async def test_a_fork_that_other_code_has_waited_for() -> None:
    async with tiny.forks() as launcher, started(launcher, "exit", "3") as (process, _):
        os.waitpid(process.pid, 0)  # noqa: ASYNC222
        assert await process.ended() == 255


@pytest.mark.parametrize("way", tiny.WAYS)
async def test_a_process_ends_by_a_signal(way: str) -> None:
    async with tiny.launcher(way) as launcher, started(launcher) as (process, _):
        process.terminate()
        assert await process.ended() == -signal.SIGTERM


@pytest.mark.parametrize("way", tiny.WAYS)
async def test_a_process_ends_with_its_lifeline(way: str) -> None:
    async with tiny.launcher(way) as launcher, started(launcher) as (process, _):
        process.close()
        assert await process.ended() == 0


@pytest.mark.parametrize("way", tiny.WAYS)
async def test_what_is_cancelled_leaves_no_process(way: str) -> None:
    async with tiny.launcher(way) as launcher:
        async with started(launcher):
            pass  # so that a zygote is there
        n_before = n_descriptors()
        pid = 0
        with trio.CancelScope() as scope:
            async with started(launcher, "hang") as (process, _):
                pid = process.pid
                scope.cancel()
                await trio.sleep_forever()
        assert not is_alive(pid)
        assert n_descriptors() == n_before


@pytest.mark.parametrize("way", tiny.WAYS)
async def test_no_process_outlives_a_router_that_is_killed(way: str) -> None:
    router = await trio.lowlevel.open_process(
        [sys.executable, "-m", "tests.support.tiny_router", way],
        stdout=subprocess.PIPE,
        env=tiny.environment(),
        cwd=Path(__file__).parents[2],
    )
    assert router.stdout is not None
    with patiently():
        waits, hangs = json.loads(await router.stdout.receive_some())
        router.send_signal(signal.SIGKILL)
        await router.wait()
    try:
        await until_gone(waits)
        if way == "forked":
            await until_gone(hangs)
        assert is_alive(hangs) == (way == "spawned"), "only Linux can end one that hangs"
    finally:
        if is_alive(hangs):
            os.kill(hangs, signal.SIGKILL)


async def test_processes_outlive_the_zygote_and_others_are_started_without_it() -> None:
    async with tiny.forks() as launcher, started(launcher) as (old, _):
        zygote = launcher.pid
        assert zygote is not None
        os.kill(zygote, signal.SIGKILL)
        for _ in range(2):
            async with started(launcher, "spawned") as (_, info):
                assert info["argv"] == ["spawned"]
        assert launcher.pid is None and not Path(f"/proc/{zygote}").exists(), "it was reaped"
        assert is_alive(old.pid)
        os.kill(old.pid, signal.SIGSEGV)
        assert await old.ended() == -signal.SIGSEGV, "how it has ended is known"


@pytest.mark.parametrize("delay", [0, 0.0005, 0.001, 0.002, 0.004])
async def test_nothing_is_left_of_an_order_in_which_the_zygote_is_killed(delay: float) -> None:
    async with tiny.forks() as launcher:
        async with started(launcher):
            pass  # so that it is there
        assert launcher.pid is not None
        killing = threading.Timer(delay, os.kill, [launcher.pid, signal.SIGKILL])
        killing.start()
        async with started(launcher) as (process, _):
            assert parent_of(process.pid) == os.getpid()
        killing.join()
    assert not [one for one in all_processes() if parent_of(one) == os.getpid()]


async def test_a_zygote_that_does_not_answer_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trioserve.children.launch._FORK_TIMEOUT", 0.1)
    async with tiny.forks() as launcher, started(launcher):
        zygote = launcher.pid
        assert zygote is not None
        os.kill(zygote, signal.SIGSTOP)
        async with started(launcher) as (process, _):
            assert process.pid
        await until_gone(zygote)


async def test_without_a_zygote_processes_are_started_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nothing = (sys.executable, "-c", "pass")
    async with tiny.forks(nothing) as forks, started(forks, "spawned") as (_, info):
        assert info["argv"] == ["spawned"]
        assert forks.pid is None
    monkeypatch.setattr("trioserve.children.launch.CAN_FORK", False)
    async with open_launcher({}) as launcher:
        assert isinstance(launcher, Spawner)


async def test_a_system_that_starts_no_zygote(monkeypatch: pytest.MonkeyPatch) -> None:
    n_before = n_descriptors()
    monkeypatch.setattr("trioserve.children.launch._ZYGOTE", ("/no/such/program",))
    async with open_launcher({}) as launcher:
        assert isinstance(launcher, Spawner)
    assert n_descriptors() == n_before


async def test_a_system_that_allows_no_more_processes() -> None:
    script = (
        "import socket, sys\n"
        "orders = socket.socket(fileno=int(sys.argv[1]))\n"
        "orders.send(b'ready')\n"
        "while orders.recv(1000):\n"
        "    orders.send(b'0')\n"
    )
    async with tiny.forks((sys.executable, "-c", script)) as forks:
        for _ in range(2):
            with pytest.raises(ModelLoadError, match="too many processes"):
                await forks.launch([])
            assert forks.pid is not None


async def test_a_command_that_is_not_there() -> None:
    n_before = n_descriptors()
    with pytest.raises(ModelLoadError, match="cannot be started: No such file"):
        await Spawner({}, ("/no/such/program",)).launch([])
    assert n_descriptors() == n_before


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Have none left."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_descriptors() + 20, hard))
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with contextlib.suppress(OSError):
            while True:
                opened.enter_context(open(os.devnull))
        yield


@pytest.mark.parametrize("way", tiny.WAYS)
async def test_without_descriptors_nothing_is_started_and_none_is_lost(way: str) -> None:
    async with tiny.launcher(way) as launcher:
        async with started(launcher):
            pass  # so that a zygote is there
        n_before = n_descriptors()
        with pytest.raises(ModelLoadError, match="Too many open files"), no_descriptors():
            await launcher.launch([])
        assert n_descriptors() == n_before


async def test_orphans_are_adopted_only_while_a_process_is_forked() -> None:
    def is_subreaper() -> bool:
        value = ctypes.c_int()
        assert ctypes.CDLL(None).prctl(PR_GET_CHILD_SUBREAPER, ctypes.byref(value), 0, 0, 0) == 0
        return bool(value.value)

    async with tiny.forks() as launcher, started(launcher, "forked") as (process, info):
        assert info["argv"] == ["forked"] and parent_of(process.pid) == os.getpid()
        assert not is_subreaper()


@pytest.mark.parametrize("way", tiny.WAYS)
async def test_what_a_process_leaves_behind_is_not_left_to_the_router(way: str) -> None:
    """Nothing in the router would reap it."""
    async with tiny.launcher(way) as launcher:
        async with started(launcher):
            pass  # so that a zygote is there
        async with started(launcher, "helper") as (process, info):
            assert parent_of(info["helper"]) == process.pid
            process.kill()
            await process.ended()
        try:
            assert parent_of(info["helper"]) != os.getpid()
        finally:
            os.kill(info["helper"], signal.SIGKILL)
