"""Commands that end on a signal, as structured concurrency has it: their work is cancelled."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable

import trio

from trioserve.errors import first_error


def run_until_signal(work: Callable[[], Awaitable[int | None]]) -> int:
    """Run async work until it ends, or SIGINT, SIGTERM or SIGHUP comes, which cancel it.

    Returns the exit code: that of the work, by default 0, or 128 and the number of the signal.
    Raises the first error of the work.
    """
    try:
        return trio.run(_run, work)
    except BaseExceptionGroup as group:
        failure = first_error(group)
    raise failure


def run_foreground(work: Callable[[], Awaitable[int]]) -> int:
    """Run async work that handles Ctrl-C itself, and return its exit code. Raises its first error.

    A Ctrl-C that it does not handle ends it.
    """
    try:
        return trio.run(work)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except BaseExceptionGroup as group:
        raise first_error(group) from None


async def _run(work: Callable[[], Awaitable[int | None]]) -> int:
    code = 0
    numbers = [signal.SIGTERM, signal.SIGINT]
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup leaves it
        numbers.append(signal.SIGHUP)

    async def watch(task_status: trio.TaskStatus[None]) -> None:
        nonlocal code
        with trio.open_signal_receiver(*numbers) as signals:
            task_status.started()
            code = 128 + await anext(signals)
        nursery.cancel_scope.cancel()

    async with trio.open_nursery() as nursery:
        await nursery.start(watch)
        code = await work() or 0
        nursery.cancel_scope.cancel()
    return code
