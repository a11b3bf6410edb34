"""What the command asks of malloc."""

from __future__ import annotations

import ctypes

#: `M_ARENA_MAX` of glibc.
_ARENA_MAX = -8

#: One for the main thread, and one for the others.
_N_ARENAS = 2


def limit_arenas() -> None:
    """Keep memory together that threads allocate; to be called before there are any.

    glibc gives threads heaps of their own, eight for each core. Workers come and go with the
    requests, and each leaves memory behind that the others do not use. The heaps would spare
    threads that allocate at the same time some waiting: Python's have to wait for each other
    anyway, and llama.cpp's allocate little.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_ARENA_MAX, _N_ARENAS)  # other libraries ignore what they do not know
