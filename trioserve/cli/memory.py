"""Limits the memory of a server process, and the pauses of the garbage collector.

To find reference cycles, Python's collector visits each list, dict and object, and holds the GIL:
half a second for the values of a body of some megabytes, repeatedly while they exist. Young objects
are collected as usual; the old generation only while requests hold little memory.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

#: Seconds between two collections, and how many times one may be postponed.
_INTERVAL = 10.0
_MAX_DELAYS = 60

#: Bytes that requests may hold during a collection.
_LITTLE = 2**22

#: The threshold of the oldest generation, which disables its automatic collection.
_NEVER = 2**30


@contextmanager
def uncollected() -> Iterator[None]:
    """Do not look for garbage during a block that imports modules, which make next to none."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()  # else the next look would be at all of them
        gc.enable()


async def keep_collecting(n_held: Callable[[], int]) -> None:
    """Collect garbage until cancelled; `n_held` tells how many bytes requests hold.

    Then the previous settings are restored.
    """
    # Existing objects are permanent: exempt them from collection.
    gc.collect()
    gc.freeze()
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        n_delays = 0
        while True:
            await trio.sleep(_INTERVAL)
            if not gc.get_count()[2]:
                continue  # few new objects
            if n_held() > _LITTLE and n_delays < _MAX_DELAYS:
                n_delays += 1
                continue
            gc.collect()
            n_delays = 0
    finally:
        gc.set_threshold(young, middle, old)


#: `M_ARENA_MAX` of glibc.
_ARENA_MAX = -8

#: One for the main thread, and one for the others.
_N_ARENAS = 2


def limit_arenas() -> None:
    """Limit the number of malloc arenas; call it before threads start.

    glibc makes up to eight arenas for each core, and spreads threads over them. Short-lived workers
    leave free memory in each, which other threads cannot use. More arenas reduce contention, but
    Python's threads take turns anyway, and llama.cpp's allocate little.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, _N_ARENAS)  # other C libraries ignore unknown parameters
