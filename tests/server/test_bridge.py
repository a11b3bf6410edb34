"""Both bridges ring through, from a thread, without loss."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import AsyncIterator, Callable

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.waiting import patiently
from trioserve.errors import BridgeError
from trioserve.server.dispatch import Bridge, EventFdBridge, SocketPairBridge, open_bridge

KINDS = [EventFdBridge, SocketPairBridge] if hasattr(os, "eventfd") else [SocketPairBridge]


@pytest.fixture(params=KINDS)
async def bridge(request: pytest.FixtureRequest) -> AsyncIterator[Bridge]:
    bridge: Bridge = request.param()
    yield bridge
    bridge.close()


async def test_a_ring_from_a_thread_wakes_the_loop(bridge: Bridge) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(bridge.wait)
        await wait_all_tasks_blocked()
        await trio.to_thread.run_sync(bridge.notify)


async def test_rings_add_up_to_one(bridge: Bridge, autojump_clock: trio.abc.Clock) -> None:
    for _ in range(100_000):  # more than a socket's buffer holds
        bridge.notify()
    await bridge.wait()
    while True:  # a socket pair may need to be emptied in parts
        with trio.move_on_after(1) as scope:
            await bridge.wait()
        if scope.cancelled_caught:
            break
    bridge.notify()
    await bridge.wait()


async def test_a_cancelled_wait_keeps_the_ring(bridge: Bridge) -> None:
    bridge.notify()
    with trio.CancelScope() as scope:
        scope.cancel()
        await bridge.wait()
    assert scope.cancelled_caught
    with patiently():
        await bridge.wait()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_ring_that_comes_too_late_is_lost(kind: Callable[[], Bridge]) -> None:
    bridge = kind()
    bridge.close()
    other = os.eventfd(0, os.EFD_NONBLOCK) if hasattr(os, "eventfd") else None
    bridge.notify()
    if other is not None:  # it has the number that the bridge had
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
        os.close(other)


@pytest.mark.parametrize("kind", KINDS)
async def test_who_waits_for_a_ring_hears_of_the_end(kind: Callable[[], Bridge]) -> None:
    bridge = kind()

    async def wait() -> None:
        with pytest.raises(trio.ClosedResourceError):
            await bridge.wait()
        heard.append(True)

    heard: list[bool] = []
    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await wait_all_tasks_blocked()
        bridge.close()
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
    assert heard


async def test_the_best_bridge_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    best = open_bridge()
    best.close()
    assert type(best) is KINDS[0]
    monkeypatch.delattr(os, "eventfd", raising=False)
    other = open_bridge()
    other.close()
    assert type(other) is SocketPairBridge


def test_without_descriptors_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(socket, "socketpair", refuse)
    with pytest.raises(BridgeError, match="Too many open files"):
        SocketPairBridge()
    if hasattr(os, "eventfd"):
        monkeypatch.setattr(os, "eventfd", refuse)
        with pytest.raises(BridgeError, match="Too many open files"):
            open_bridge()
