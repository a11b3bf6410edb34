"""`Guest`: Trio on the event loop of asyncio, which Ray has. Both run in turn, in one thread."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import suppress
from contextvars import Context
from functools import partial
from typing import Any, TypeVar

import trio
from outcome import Outcome

_T = TypeVar("_T")


class Guest:
    """Trio as a guest of the running loop. `begin` has it run, and `end` ends all of its tasks."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._begun = asyncio.Event()
        self._token: trio.lowlevel.TrioToken
        self._nursery: trio.Nursery

    async def begin(self) -> None:
        """Begin, and wait until tasks can be run."""
        trio.lowlevel.start_guest_run(
            self._live,
            run_sync_soon_threadsafe=self._loop.call_soon_threadsafe,
            run_sync_soon_not_threadsafe=self._loop.call_soon,
            done_callback=self._end,
        )
        await self._begun.wait()

    async def _live(self) -> None:
        async with trio.open_nursery() as self._nursery:
            self._token = trio.lowlevel.current_trio_token()
            self._begun.set()
            await trio.sleep_forever()

    def _end(self, outcome: Outcome[None]) -> None:
        with suppress(trio.Cancelled):
            outcome.unwrap()
        self._ended.set_result(None)

    async def end(self) -> None:
        """Cancel all tasks, and wait for their ends."""
        self._token.run_sync_soon(self._nursery.cancel_scope.cancel)
        await self._ended

    async def run(self, work: Callable[[], Awaitable[_T]]) -> _T:
        """Run an async function of Trio, and return what it does. When cancelled, it is, too."""
        done: asyncio.Future[_T] = self._loop.create_future()
        scope = trio.CancelScope()

        async def job() -> None:
            try:
                with scope:
                    result = await work()
            except Exception as error:
                done.set_exception(error)
            else:
                if scope.cancelled_caught:
                    done.cancel()
                else:
                    done.set_result(result)
            finally:
                done.cancel()  # unless it is done: Trio ends

        self._token.run_sync_soon(self._nursery.start_soon, job)
        try:
            return await asyncio.shield(done)
        finally:
            if not done.done():
                self._token.run_sync_soon(scope.cancel)
                await asyncio.wait([done])

    async def ask_host(self, make: Callable[[], Coroutine[Any, Any, _T]]) -> _T:
        """Run a coroutine of asyncio, from a task of Trio. When that is cancelled, so is this.

        Its context is new. Serve identifies a call by the request in its context, so one
        of two calls to the same deployment would never get a replica.
        """
        done = trio.Event()
        task = self._loop.create_task(make(), context=Context())
        task.add_done_callback(lambda _: self._token.run_sync_soon(done.set))
        try:
            await done.wait()
        finally:
            if not task.done():
                task.cancel()
                with trio.CancelScope(shield=True):
                    await done.wait()
        return task.result()

    async def messages(
        self,
        app: Callable[..., Awaitable[object]],
        scope: Any,
        receive: Callable[[], Coroutine[Any, Any, Any]],
    ) -> AsyncIterator[Any]:
        """Give the messages of an ASGI app of Trio that answers a request.

        They wait here without a bound, as those that Serve's proxy has not sent do.
        """
        sent: asyncio.Queue[Any] = asyncio.Queue()

        async def send(message: Any) -> None:
            sent.put_nowait(message)

        answer = partial(app, scope, partial(self.ask_host, receive), send)
        task = asyncio.create_task(self.run(answer))
        task.add_done_callback(lambda _: sent.put_nowait(None))
        try:
            while (message := await sent.get()) is not None:
                yield message
            await task
        finally:
            task.cancel()
            await asyncio.wait([task])
