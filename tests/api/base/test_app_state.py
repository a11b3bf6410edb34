"""The end of an app."""

from __future__ import annotations

import trio
from trio.testing import wait_all_tasks_blocked

from trioserve.api.base.service import Service


async def test_what_never_began_need_not_end() -> None:
    async with trio.open_nursery() as nursery:
        service, stopped = Service(), trio.Event()

        async def stop() -> None:
            await service.stop()
            stopped.set()

        nursery.start_soon(stop)
        await wait_all_tasks_blocked()
        was_stopped = stopped.is_set()
        await service.run()  # as an app may that was stopped before its task began
        assert was_stopped and stopped.is_set()
