"""Cancels something at each of its awaits."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio


class CancelAtStep(trio.abc.Instrument):
    """Cancels a scope when a task, or a child of it, is about to take the n-th step of them all."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.scope = trio.CancelScope()
        self.steps = 0
        self._family: set[trio.lowlevel.Task] = set()

    async def run(self, call: Callable[[], Awaitable[None]]) -> None:
        """Call a function in a new task, and cancel it at its n-th step."""

        async def adopted() -> None:
            self._family.add(trio.lowlevel.current_task())
            with self.scope:
                await call()

        trio.lowlevel.add_instrument(self)
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(adopted)
        finally:
            trio.lowlevel.remove_instrument(self)

    def task_spawned(self, task: trio.lowlevel.Task) -> None:
        nursery = task.parent_nursery
        if nursery is not None and nursery.parent_task in self._family:
            self._family.add(task)

    def after_task_step(self, task: trio.lowlevel.Task) -> None:
        if task in self._family:
            self.steps += 1
            if self.steps == self.n:
                self.scope.cancel()
