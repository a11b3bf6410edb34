"""`alongside`: tasks that run while a block runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import trio


@asynccontextmanager
async def alongside(*functions: Callable[[], Awaitable[object]]) -> AsyncIterator[trio.Nursery]:
    """Run async functions while a block runs, then cancel them. The block may start more.

    An exception in the block propagates unchanged, not in the exception group of a nursery.
    If a function fails, the block is cancelled and the group propagates, with the exception of
    the block as its context. If a function fails while it is cancelled, the group contains both.
    """
    failure: BaseException | None = None
    has_failed_first = False
    try:
        async with trio.open_nursery() as nursery:
            for function in functions:
                nursery.start_soon(function)
            try:
                yield nursery
            except BaseException as error:
                failure, has_failed_first = error, nursery.cancel_scope.cancel_called
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        is_cancelled = _is_cancelled(group)
        # If both were cancelled from outside, one `Cancelled` says it, as it would without us.
        if failure is None or (has_failed_first and not is_cancelled):
            group.__context__, failure = failure, group
        elif not is_cancelled:
            failure = BaseExceptionGroup(group.message, [failure, *group.exceptions])
    try:
        if failure is not None:
            raise failure
    finally:
        del failure  # this frame is in its traceback


def _is_cancelled(error: BaseException) -> bool:
    """Whether an exception is `Cancelled`, or a group that contains nothing else."""
    if isinstance(error, BaseExceptionGroup):
        return error.split(trio.Cancelled)[1] is None
    return isinstance(error, trio.Cancelled)
