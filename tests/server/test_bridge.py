"""Both bridges ring through, from a thread, without loss."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.waiting import patiently
from trioserve.errors import BridgeError
from trioserve.server.dispatch import Bridge, EventFdBridge, SocketPairBridge, open_bridge

KINDS = [EventFdBridge, SocketPairBridge] if hasattr(os, "eventfd") else [SocketPairBridge]


@pytest.fixture(params=KINDS)
def bridge(request: pytest.FixtureRequest) -> Iterator[Bridge]:
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


def test_the_best_bridge_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
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
