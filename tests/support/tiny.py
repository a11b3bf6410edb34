"""Ways to start `tests.support.tiny_child`, which is a real process and starts at once."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from trioserve.concurrency import alongside
from trioserve.router.launch import Forks, Launcher, Spawner

#: Both ways: a Python for each process, or forks of one that waits.
WAYS = ("spawned", "forked")

_ROOT = str(Path(__file__).parents[2])
_CHILD = (sys.executable, "-m", "tests.support.tiny_child")
_ZYGOTE = (sys.executable, "-m", "tests.support.tiny_zygote")


def environment() -> dict[str, str]:
    """What tiny processes have in their environment."""
    return {**os.environ, "COLOUR": "green", "PYTHONPATH": _ROOT}


def spawner() -> Spawner:
    return Spawner(environment(), _CHILD)


@asynccontextmanager
async def forks() -> AsyncIterator[Forks]:
    """Forks of a tiny zygote, and without one the tiny process as it is."""
    made = Forks(environment(), spawner(), _ZYGOTE)
    async with alongside(made.run):
        yield made


@asynccontextmanager
async def launcher(way: str) -> AsyncIterator[Launcher]:
    if way == "spawned":
        yield spawner()
    else:
        async with forks() as made:
            yield made
