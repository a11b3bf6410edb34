"""A fleet of scripted processes, and requests that keep its models."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from tests.support.scripted_children import ScriptedCatalog, ScriptedLauncher, entry
from trioserve.errors import TrioServeError
from trioserve.model_process.connection import Line
from trioserve.router.child import HealthCheck, ModelChild
from trioserve.router.fleet import Fleet
from trioserve.router.states import QueueStatus, Status

A, B, C = entry("a"), entry("b"), entry("c")


async def answers(line: Line) -> None:
    await trio.lowlevel.checkpoint()


def fleet_of(
    launcher: ScriptedLauncher,
    *,
    catalog: ScriptedCatalog | None = None,
    ask: Callable[[Line], Awaitable[None]] = answers,
    **settings: Any,
) -> Fleet:
    listed: Any = catalog or ScriptedCatalog(A, B, C)
    return Fleet(listed, launcher=launcher, watch=HealthCheck(ask=ask), **settings)


class Request:
    """A request that keeps its model until `end`."""

    def __init__(self) -> None:
        self.child: ModelChild | None = None
        self.error: TrioServeError | None = None
        self.waited: list[QueueStatus] = []
        self._end = trio.Event()
        self.ended = trio.Event()

    async def run(self, fleet: Fleet, model: str) -> None:
        try:
            one = fleet.catalog.entries[model]
            async with fleet.use(one, on_wait=self.waited.append) as self.child:
                await self._end.wait()
        except TrioServeError as error:
            self.error = error
        finally:
            self.ended.set()

    def end(self) -> None:
        self._end.set()


class Requests:
    """Requests as separate tasks."""

    def __init__(self, fleet: Fleet, nursery: trio.Nursery) -> None:
        self._fleet, self._nursery = fleet, nursery

    async def begin(self, model: str) -> Request:
        request = Request()
        self._nursery.start_soon(request.run, self._fleet, model)
        await wait_all_tasks_blocked()
        return request


@asynccontextmanager
async def requests_of(fleet: Fleet) -> AsyncIterator[Requests]:
    async with trio.open_nursery() as nursery:
        yield Requests(fleet, nursery)
        nursery.cancel_scope.cancel()


def status_of(fleet: Fleet, model: str) -> Status:
    return fleet.state(model).value
