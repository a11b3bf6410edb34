"""Small pieces of structured concurrency that Trio does not have."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def alongside(function: Callable[[], Awaitable[object]]) -> AsyncIterator[None]:
    """Run an async function for as long as a block lasts, then cancel it.

    An exception of the block comes out as it is, not in the group that a nursery makes of it.
    When the function fails, the block is cancelled and the group comes out.
    """
    failure: BaseException | None = None
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(function)
            try:
                yield
            except BaseException as error:
                failure = error
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # Both were cancelled from outside: one `Cancelled` says it, as it would without us.
        if failure is None or group.split(trio.Cancelled)[1] is not None:
            raise
    if failure is not None:
        raise failure
