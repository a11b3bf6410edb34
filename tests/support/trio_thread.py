"""A Trio loop in a separate thread, for tests that are plain functions."""

from __future__ import annotations

import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeVar

import trio

from tests.support.waiting import PATIENCE

_T = TypeVar("_T")

#: Longer than anything takes to start or to end, in seconds.
_TIMEOUT = PATIENCE


class TrioThread:
    """Runs until its block is left; what fails in it is raised there.

    While it runs, `open` enters an async context manager in a task, and `run` calls a function.
    """

    def __init__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="trio", daemon=True)
        self._is_running = threading.Event()
        self._failure: BaseException | None = None

    def __enter__(self) -> TrioThread:
        self._thread.start()
        assert self._is_running.wait(_TIMEOUT)
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread.is_alive():
            self._token.run_sync_soon(self._stop.set)
        self._thread.join(_TIMEOUT)
        assert not self._thread.is_alive()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            trio.run(self._main)
        except BaseException as error:
            self._failure = error

    async def _main(self) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._stop = trio.Event()
        async with trio.open_nursery() as self._nursery:
            self._is_running.set()
            await self._stop.wait()

    def run(self, function: Callable[..., Awaitable[_T]], *args: object) -> _T:
        """Call an async function there, and wait for it."""
        return trio.from_thread.run(function, *args, trio_token=self._token)

    @contextmanager
    def open(self, manager: AbstractAsyncContextManager[_T]) -> Iterator[_T]:
        """Enter a context manager in a task of that loop, and leave it at the end of the block."""
        leave, has_left = trio.Event(), threading.Event()

        async def hold(task_status: trio.TaskStatus[_T]) -> None:
            try:
                async with manager as value:
                    task_status.started(value)
                    await leave.wait()
            finally:
                has_left.set()

        value = self.run(self._start, hold)
        try:
            yield value
        finally:
            if self._thread.is_alive():
                self._token.run_sync_soon(leave.set)
            assert has_left.wait(_TIMEOUT)

    async def _start(self, hold: Callable[..., Awaitable[object]]) -> object:
        return await self._nursery.start(lambda *, task_status: hold(task_status))
