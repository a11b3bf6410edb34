"""Commands that end on a signal, as structured concurrency has it: their work is cancelled."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable

import trio

from trioserve.errors import TrioServeError, first_error


def run_until_signal(work: Callable[[], Awaitable[object]]) -> int:
    """Run async work until it ends, or SIGINT or SIGTERM comes, which cancel it.

    Returns the exit code: 0, or 128 and the number of the signal.

    Raises:
        TrioServeError: what the work raises.
    """
    try:
        return trio.run(_run, work)
    except* TrioServeError as group:
        failure = first_error(group)
    raise failure


async def _run(work: Callable[[], Awaitable[object]]) -> int:
    code = 0

    async def watch(task_status: trio.TaskStatus[None]) -> None:
        nonlocal code
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
            task_status.started()
            code = 128 + await anext(signals)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        await nursery.start(watch)
        await work()
        nursery.cancel_scope.cancel()
    return code
