"""Subscribers to what happens to models come and leave."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.router.states import MAX_UNREAD, Events, FleetEvent

LOADED = FleetEvent(model="model", event="model_status")


async def test_an_event_meets_a_subscriber_that_has_stopped_reading() -> None:
    events = Events()
    with events.subscribe() as leaves, events.subscribe() as stays:
        leaves.end(now=True)
        events.tell(LOADED)
        assert await anext(stays) is LOADED


async def test_an_event_meets_subscribers_that_leave() -> None:
    """The page is closed while models load: at no step of its leaving may an event raise."""
    events = Events()

    async def subscriber() -> None:
        with events.subscribe():
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for _ in range(20):
            nursery.start_soon(subscriber)
        await wait_all_tasks_blocked()
        nursery.cancel_scope.cancel()
        with trio.CancelScope(shield=True):
            for _ in range(5):
                events.tell(LOADED)
                await trio.lowlevel.checkpoint()
    assert not events._feeds


async def test_a_subscriber_that_does_not_read_is_cut_off_alone() -> None:
    events = Events()
    with events.subscribe() as stuck, events.subscribe() as reads:
        for _ in range(MAX_UNREAD + 1):
            events.tell(LOADED)
            assert await anext(reads) is LOADED
        assert [event async for event in stuck] == [LOADED] * MAX_UNREAD
