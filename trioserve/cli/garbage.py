"""When Python looks for garbage: not while requests hold many objects.

To find reference cycles, the collector looks at each list, dict and object, and no thread runs
meanwhile: half a second for the values of a body of some megabytes, again and again while they
are there. What was made lately is still looked at as usual; the rest only while there is little.
"""

from __future__ import annotations

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
