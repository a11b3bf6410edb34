"""Commands that end on a signal, as structured concurrency has it: their work is cancelled.

Ctrl-C before and after that ends the process at once, as `trioserve.__main__` says.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

import trio

from trioserve.errors import first_error


def run_until_signal(work: Callable[[], Awaitable[int | None]]) -> int:
    """Run async work until it ends, or SIGINT, SIGTERM or SIGHUP comes, which cancel it.

    Returns the exit code: that of the work, by default 0, or 128 and the number of the signal.
    Raises the first error of the work.
    """
    return _run(work, (signal.SIGTERM, signal.SIGINT, signal.SIGHUP))


def run_foreground(work: Callable[[], Awaitable[int]]) -> int:
    """Run async work that handles Ctrl-C itself, as `run_until_signal`.

    A Ctrl-C that it does not handle ends it, too.
    """
    try:
        with _raised_interrupts():
            return _run(work, (signal.SIGTERM, signal.SIGHUP))
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


async def first_signal(task_status: trio.TaskStatus[None]) -> int:
    """Wait for SIGTERM or SIGINT, and return its number. A second one has its default action."""
    numbers = (signal.SIGTERM, signal.SIGINT)
    with trio.open_signal_receiver(*numbers) as signals:
        task_status.started()
        number: int = await anext(signals)
    for each in numbers:
        signal.signal(each, signal.SIG_DFL)
    return number


def _is_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def _raised_interrupts() -> Iterator[None]:
    """Have SIGINT raise KeyboardInterrupt, which Trio brings where it can be handled."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.SIG_IGN or not _is_main_thread():
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _run(work: Callable[[], Awaitable[int | None]], numbers: Sequence[int]) -> int:
    try:
        return trio.run(_watched, work, numbers)
    except BaseExceptionGroup as group:
        interrupted = group.subgroup(KeyboardInterrupt) is not None
        failure = KeyboardInterrupt() if interrupted else first_error(group)
    raise failure


async def _watched(work: Callable[[], Awaitable[int | None]], numbers: Sequence[int]) -> int:
    code = 0
    if not _is_main_thread():  # a program that runs a command; signals are its own
        return await work() or 0
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # as nohup leaves it
        numbers = [one for one in numbers if one != signal.SIGHUP]

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
