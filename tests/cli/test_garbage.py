"""When Python looks for garbage while a command serves."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from trioserve.cli.memory import keep_collecting


class Cycle:
    """Garbage that only the collector finds."""

    def __init__(self) -> None:
        self.me = self


@pytest.fixture(autouse=True)
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


async def test_it_is_not_put_off_for_ever(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(keep_collecting, lambda: 2**40)
        await trio.testing.wait_all_tasks_blocked()
        garbage = old_garbage()
        await trio.sleep(700)
        assert garbage() is None
        nursery.cancel_scope.cancel()
