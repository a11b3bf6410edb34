"""Processes that decode: kept, replaced, ended. A stopped one stands for one that takes long."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.media_files import image_file
from tests.support.waiting import patiently, until
from trioserve.children.child import ChildError
from trioserve.errors import InvalidMediaError, ServerClosingError, UnavailableError
from trioserve.fair_limiter import working_for
from trioserve.media import process
from trioserve.media.decoders import Decoders
from trioserve.media.orders import MediaLimits, Order
from trioserve.media.process import Decoder
from trioserve.types import DecodedImage

pytestmark = pytest.mark.system

IMAGE = Order(format="png", kind="image")
SMALL = image_file()


@asynccontextmanager
async def opened(**limits: float) -> AsyncIterator[Decoders]:
    decoders = Decoders(MediaLimits(**limits))
    try:
        yield decoders
    finally:
        await decoders.aclose()


async def pid_of(decoders: Decoders) -> int:
    """Have something decoded; gives the process that did it, and waits for more."""
    await decoders.decode(SMALL, IMAGE)
    (idle,) = decoders._idle
    assert idle.pid is not None
    return idle.pid


async def pids_of(decoders: Decoders, n: int) -> list[int]:
    """Have several files decoded at the same time; gives the processes, which wait for more."""
    with patiently():
        while len(decoders._idle) < n:
            async with trio.open_nursery() as nursery:
                for _ in range(n):
                    nursery.start_soon(decoders.decode, SMALL, IMAGE)
    return [idle.pid for idle in decoders._idle if idle.pid is not None]


def is_running(pid: int) -> bool:
    """True while a process runs. A process without a parent may stay as a zombie."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return bool(state.stdout.strip()) and not state.stdout.startswith("Z")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_process_is_kept() -> None:
    async with opened() as decoders:
        pid = await pid_of(decoders)
        with pytest.raises(InvalidMediaError):
            await decoders.decode(SMALL[:50], IMAGE)
        assert await pid_of(decoders) == pid
    assert not is_alive(pid)


async def test_there_are_no_more_than_two() -> None:
    async with opened() as decoders:
        async with trio.open_nursery() as nursery:
            for _ in range(6):
                nursery.start_soon(decoders.decode, SMALL, IMAGE)
        assert 1 <= len(decoders._idle) <= 2


async def test_one_that_has_died_is_replaced() -> None:
    async with opened() as decoders:
        pid = await pid_of(decoders)
        os.kill(pid, signal.SIGKILL)
        while is_running(pid):
            await trio.sleep(0.001)
        assert await pid_of(decoders) != pid
        assert not is_alive(pid)


async def test_cancelling_ends_the_process_and_waits_for_it() -> None:
    async with opened() as decoders:
        pid = await pid_of(decoders)
        os.kill(pid, signal.SIGSTOP)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(decoders.decode, SMALL, IMAGE)
                await wait_all_tasks_blocked()
                scope.cancel()
        assert scope.cancelled_caught
        assert not is_alive(pid)
        assert await pid_of(decoders) != pid


async def test_cancelling_before_it_has_begun_leaves_nothing() -> None:
    async with opened() as decoders:
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(decoders.decode, SMALL, IMAGE)
                await trio.lowlevel.checkpoint()
                scope.cancel()
        assert scope.cancelled_caught
        assert isinstance(await decoders.decode(SMALL, IMAGE), DecodedImage)


async def test_a_file_that_does_not_get_the_cpu_is_not_at_fault() -> None:
    async with opened() as decoders:
        pid = await pid_of(decoders)
        decoders._limits = MediaLimits(timeout=0.05)
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(UnavailableError, match="because of other work") as caught:
            await decoders.decode(SMALL, IMAGE)
        assert caught.value.retry_after == 5
        assert not is_alive(pid)


async def test_a_second_client_does_not_wait_for_the_files_of_the_first() -> None:
    async with opened() as decoders, trio.open_nursery() as nursery:
        pids = await pids_of(decoders, 2)
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        with working_for("first"):
            for _ in range(9):
                nursery.start_soon(decoders.decode, SMALL, IMAGE)
        await wait_all_tasks_blocked()
        with working_for("second"):
            assert isinstance(await decoders.decode(SMALL, IMAGE), DecodedImage)
        nursery.cancel_scope.cancel()


async def test_a_file_that_ends_the_process_is_refused() -> None:
    async with opened() as decoders:
        pid = await pid_of(decoders)
        os.kill(pid, signal.SIGSTOP)

        async def kill() -> None:
            await wait_all_tasks_blocked()
            os.kill(pid, signal.SIGSEGV)
            os.kill(pid, signal.SIGCONT)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(kill)
            with pytest.raises(InvalidMediaError, match="too much time or memory"):
                await decoders.decode(SMALL, IMAGE)


async def test_closing_ends_what_runs() -> None:
    async with opened() as decoders:
        pid = await pid_of(decoders)
        os.kill(pid, signal.SIGSTOP)

        async def decode() -> None:
            with pytest.raises(ServerClosingError):
                await decoders.decode(SMALL, IMAGE)

        async with trio.open_nursery() as nursery:
            for _ in range(4):  # two of them wait for the others
                nursery.start_soon(decode)
            await wait_all_tasks_blocked()
            await decoders.aclose()
        assert not is_alive(pid)
        await decode()


async def test_no_process_is_no_fault_of_the_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/none")
    async with opened() as decoders:
        with pytest.raises(UnavailableError):
            await decoders.decode(SMALL, IMAGE)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    async with opened() as decoders:
        with pytest.raises(UnavailableError):
            await decoders.decode(SMALL, IMAGE)


async def test_a_process_ends_with_its_server() -> None:
    program = (
        "import os\n"
        "from tests.support.media_files import image_file\n"
        "from trioserve.media.process import Decoder\n"
        "from trioserve.media.orders import MediaLimits, Order\n"
        "decoder = Decoder.start(MediaLimits())\n"
        "decoder.decode(image_file(), Order(format='png', kind='image'))\n"
        "print(decoder.pid, flush=True)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = await trio.run_process([sys.executable, "-c", program], capture_stdout=True, check=False)
    await until(lambda: not is_running(int(done.stdout)))


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
async def test_a_process_may_do_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    limits = MediaLimits(max_pixels=2**20, max_bytes=2**20)
    async with opened(max_pixels=2**20, max_bytes=2**20) as decoders:
        proc = Path(f"/proc/{await pid_of(decoders)}")
        rows = [re.split(r"  +", row) for row in proc.joinpath("limits").read_text().splitlines()]
        most = {row[0]: row[2] for row in rows}
        assert most["Max open files"] == "3" == str(len(list(proc.joinpath("fd").iterdir())))
        assert most["Max file size"] == most["Max processes"] == most["Max core file size"] == "0"
        assert 0 < int(most["Max address space"]) - limits.max_memory < 2**31
        assert b"secret" not in proc.joinpath("environ").read_bytes()
        assert os.getsid(int(proc.name)) == int(proc.name)


def test_a_decoder_that_was_ended_decodes_nothing() -> None:
    with Decoder.start(MediaLimits()) as ended:
        ended.kill()
        with pytest.raises(ChildError, match="the process has ended") as caught:
            ended.decode(SMALL, IMAGE)
    assert caught.value.code == -signal.SIGKILL
    assert not ended.is_alive


async def test_a_process_that_has_grown_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    async with opened() as decoders:
        pid = await pid_of(decoders)
        assert await pid_of(decoders) == pid
        monkeypatch.setattr(process, "_MAX_KEPT", 2**20)
        assert isinstance(await decoders.decode(SMALL, IMAGE), DecodedImage)
        assert not is_alive(pid)


#: The program of a decoder that a file has taken over, after it has read an order.
TAKEN_OVER = """
import os, time, msgspec
from trioserve.children import inside
from trioserve.media.orders import Data, End, Picture, Text

parent = inside.Parent()
parent.receive(), parent.receive()
send = lambda answer: parent.send(msgspec.msgpack.encode(answer))
"""


@pytest.mark.parametrize(
    "attack",
    [
        "os.write(0, b'garbage' * 1000)",
        "parent.send(b'garbage')",
        "parent.send(bytes(100 * 2**20))",
        "os.write(0, (2**20).to_bytes(4, 'little') + b'half'); os._exit(0)",
        "send(Picture(0.0, 9, 9)); os._exit(0)",
        "send(Picture(0.0, 9, 9)); send(End())",
        "while True: send(Data(bytes(2**20)))",
        "while True: send(Text(0, ''))",
        "parent.send(b'[' * 2**20)",
        "os.fork(); parent.send(b'garbage')",
    ],
)
async def test_a_process_that_a_file_has_taken_over_is_ended(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attack: str
) -> None:
    (tmp_path / "taken_over.py").write_text(f"{TAKEN_OVER}\n{attack}\ntime.sleep(1000)")
    monkeypatch.syspath_prepend(str(tmp_path))
    async with opened() as decoders:
        with monkeypatch.context() as taken, patiently():
            taken.setattr(decoders, "_module", "taken_over")
            with pytest.raises((InvalidMediaError, UnavailableError)):
                await decoders.decode(SMALL, IMAGE)
        assert not decoders._idle
        assert isinstance(await decoders.decode(SMALL, IMAGE), DecodedImage)
