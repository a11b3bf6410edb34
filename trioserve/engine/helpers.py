"""Helper threads, which are started with a model: later, the system may refuse them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

from trioserve.errors import ModelLoadError

_REFUSED = "The model needs a thread that the system refuses: it limits threads or memory."


def start(thread: threading.Thread) -> None:
    """Start a thread. Raises ModelLoadError if the system refuses it."""
    try:
        thread.start()
    except RuntimeError as error:
        raise ModelLoadError(_REFUSED) from error


def start_all(pool: ThreadPoolExecutor, n_threads: int) -> None:
    """Start the threads of a pool, which has no work yet. Raises as `start`."""
    together = threading.Barrier(n_threads + 1)
    try:
        for _ in range(n_threads):
            pool.submit(together.wait)
    except RuntimeError as error:
        together.abort()
        pool.shutdown()
        raise ModelLoadError(_REFUSED) from error
    together.wait()
