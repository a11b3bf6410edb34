"""Ways to start `tests.support.tiny_child`, which is a real process and starts at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from trioserve.children.child import Child
from trioserve.children.frames import FrameStream
from trioserve.children.launch import Forks, Launcher, Spawner, start_zygote
from trioserve.children.reports import Failed, decode

#: Both ways: a Python for each process, or forks of one that waits.
WAYS = ("spawned", "forked")

_ROOT = str(Path(__file__).parents[2])
_CHILD = (sys.executable, "-m", "tests.support.tiny_child")
_ZYGOTE = (sys.executable, "-m", "tests.support.tiny_zygote")


def environment() -> dict[str, str]:
    """The environment of tiny processes."""
    return {**os.environ, "COLOUR": "green", "PYTHONPATH": _ROOT}


def spawner() -> Spawner:
    return Spawner(environment(), _CHILD)


@asynccontextmanager
async def forks(command: Sequence[str] = _ZYGOTE) -> AsyncIterator[Forks]:
    """Forks of a tiny zygote, and without one the tiny process as it is."""
    made = Forks(start_zygote(environment(), command), spawner())
    try:
        yield made
    finally:
        await made.end()


async def info_of(process: Child) -> dict[str, Any]:
    """Read what a tiny process says of itself."""
    payload = await FrameStream(process.socket).receive()
    assert payload is not None
    report = decode(payload)
    assert isinstance(report, Failed)
    return json.loads(report.message)  # type: ignore[no-any-return]


@asynccontextmanager
async def launcher(way: str) -> AsyncIterator[Launcher]:
    if way == "spawned":
        yield spawner()
    else:
        async with forks() as made:
            yield made
