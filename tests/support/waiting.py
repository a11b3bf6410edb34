"""Waits of tests, with one generous limit, so that a busy machine fails no test."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager

import trio

#: Seconds for what must come. It takes milliseconds; only a defect takes this long.
PATIENCE = 60.0

#: Seconds between two looks at what cannot be waited for.
_INTERVAL = 0.002


def patiently() -> AbstractContextManager[trio.CancelScope]:
    """Give a block as much time. Raises `trio.TooSlowError` when it is over."""
    return trio.fail_after(PATIENCE)


async def until(condition: Callable[[], object | Awaitable[object]]) -> None:
    """Look again and again until a condition is true, in real time.

    Raises:
        trio.TooSlowError: it was not true within `PATIENCE`.
    """
    with trio.fail_after(PATIENCE):
        while True:
            value = condition()
            if await value if inspect.isawaitable(value) else value:
                return
            await trio.sleep(_INTERVAL)
