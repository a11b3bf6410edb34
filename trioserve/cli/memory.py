"""How the command keeps the memory of a server small, and its pauses short.

To find reference cycles, Python's collector looks at each list, dict and object, and no thread runs
meanwhile: half a second for the values of a body of some megabytes, again and again while they
are there. What was made lately is still looked at as usual; the rest only while there is little.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable

import trio

#: Seconds between two looks, and how many times a look may be put off.
_INTERVAL = 10.0
_MAX_DELAYS = 60

#: Bytes that requests may hold during a look.
_LITTLE = 2**22

#: Of the collector's oldest generation: never by itself.
_NEVER = 2**30


async def keep_collecting(n_held: Callable[[], int]) -> None:
    """Collect garbage until cancelled. The settings of before then hold again.

    Args:
        n_held: tells how many bytes requests hold.
    """
    # What was made until now stays: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, _NEVER)
    try:
        n_delays = 0
        while True:
            await trio.sleep(_INTERVAL)
            if not gc.get_count()[2]:
                continue  # nothing much was made
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
    """Keep memory together that threads allocate; to be called before there are any.

    glibc makes up to eight heaps for each core, and spreads threads over them. Workers come and go
    with the requests, and each leaves memory behind that the others do not use. The heaps would
    spare threads that allocate at the same time some waiting: Python's have to wait for each other
    anyway, and llama.cpp's allocate little.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, _N_ARENAS)  # other libraries ignore what they do not know
