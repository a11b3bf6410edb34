"""File descriptors: how many the process may have open, and how many connections that makes."""

from __future__ import annotations

import contextlib
import math
import sys

if sys.platform != "win32":
    import resource

#: Descriptors that are kept for files, and for clients that are told that there are too many.
RESERVE = 64


def raise_limit() -> None:
    """Let the process have as many descriptors as its hard limit allows."""
    if sys.platform == "win32":
        return
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # macOS has a limit below the hard one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def max_connections() -> float:
    """How many connections the limit of descriptors allows, now."""
    if sys.platform == "win32":
        return math.inf
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return math.inf if limit == resource.RLIM_INFINITY else max(1, limit - RESERVE)
