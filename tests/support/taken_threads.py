"""A server with all worker threads taken."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import trio


@contextmanager
def all_taken() -> Iterator[trio.CapacityLimiter]:
    """Trio's own limiter of threads with none left. Its statistics say how many tasks wait."""
    limiter = trio.to_thread.current_default_thread_limiter()
    n, limiter.total_tokens = limiter.total_tokens, 1
    limiter.acquire_on_behalf_of_nowait(limiter)
    try:
        yield limiter
    finally:
        limiter.total_tokens = n
        limiter.release_on_behalf_of(limiter)
