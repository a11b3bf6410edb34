"""Memory of a command that serves: heaps of threads, and when Python looks for garbage."""

from __future__ import annotations

import ctypes
import gc
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
import trio.testing

from trioserve.cli.memory import keep_collecting

#: Threads that hold memory at the same time; then malloc writes what heaps there are.
_SCRIPT = """
import ctypes, sys, threading

if "limit" in sys.argv:
    from trioserve.cli.memory import limit_arenas

    limit_arenas()

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
all_hold = threading.Barrier(6)

def allocate():
    libc.malloc(ctypes.c_size_t(10_000))
    all_hold.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.system
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="glibc has it")
def test_threads_share_two_heaps(tmp_path: Path) -> None:
    n_heaps = {}
    for mode in ("limit", "default"):
        path = tmp_path / mode
        subprocess.run([sys.executable, "-c", _SCRIPT, str(path), mode], check=True)
        n_heaps[mode] = path.read_text().count("<heap nr=")
    assert n_heaps["limit"] == 2
    assert n_heaps["default"] > 2


# -- garbage


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture
def frozen() -> Iterator[None]:
    """Do not look at all objects of the tests again and again."""
    gc.collect(0)
    gc.freeze()
    yield
    gc.unfreeze()


def old_garbage() -> weakref.ref[Cycle]:
    """Make garbage that is too old for what is collected all the time."""
    cycle = Cycle()
    gc.collect(0)
    gc.collect(1)
    return weakref.ref(cycle)


@pytest.mark.usefixtures("frozen")
async def test_old_garbage_is_left_while_requests_hold_much(
    autojump_clock: trio.testing.MockClock,
) -> None:
    before = gc.get_threshold()
    held = 2**23
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_collecting, lambda: held)
        await trio.testing.wait_all_tasks_blocked()
        assert gc.get_threshold()[:2] == before[:2] and gc.get_threshold()[2] > 10**6
        garbage = old_garbage()
        await trio.sleep(300)
        assert garbage() is not None
        held = 0
        await trio.sleep(11)
        assert garbage() is None
        nursery.cancel_scope.cancel()
    assert gc.get_threshold() == before


@pytest.mark.usefixtures("frozen")
async def test_it_is_not_put_off_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_collecting, lambda: 2**40)
        await trio.testing.wait_all_tasks_blocked()
        garbage = old_garbage()
        await trio.sleep(700)
        assert garbage() is None
        nursery.cancel_scope.cancel()
