"""Both bridges ring through, from a thread, without loss."""

from __future__ import annotations

import errno
import os
from collections.abc import AsyncIterator, Callable

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.scripts import answering
from tests.support.waiting import patiently
from trioserve.config import Config
from trioserve.errors import BridgeError
from trioserve.server import Server
from trioserve.server.dispatch import Bridge, EventFdBridge, RunSyncSoonBridge, open_bridge
from trioserve.testing import scripted

KINDS = [EventFdBridge, RunSyncSoonBridge] if hasattr(os, "eventfd") else [RunSyncSoonBridge]


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
    for _ in range(100_000):
        bridge.notify()
    await bridge.wait()
    with trio.move_on_after(1) as scope:
        await bridge.wait()
    assert scope.cancelled_caught
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
    assert type(other) is RunSyncSoonBridge


@pytest.mark.skipif(not hasattr(os, "eventfd"), reason="only Linux has eventfd")
def test_without_descriptors_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(os, "eventfd", refuse)
    with pytest.raises(BridgeError, match="Too many open files"):
        open_bridge()


def test_a_ring_after_the_event_loop_has_ended_is_lost() -> None:
    async def main() -> Bridge:
        return RunSyncSoonBridge()

    trio.run(main).notify()


@pytest.mark.parametrize("kind", KINDS)
async def test_a_server_runs_over_each_bridge(
    kind: Callable[[], Bridge], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trioserve.server.lifecycle.engine.open_bridge", kind)
    async with Server(Config(), load=scripted(answering("abc"))) as server:
        with patiently():
            assert (await server.complete("p")).text == "abc"
            assert (await server.status()).counters.decodes
