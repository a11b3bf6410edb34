"""The program `trioserve`, with a router that takes its time, as llama-server's tests expect it.

They run llama-server with ``LLAMA_SERVER_DEBUG_FAKE_TIMING``, which makes a request that has its
model wait for two seconds, so that a model can be found busy.
"""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import trio

from trioserve.cli.main import main
from trioserve.router.child import ModelChild
from trioserve.router.fleet import Fleet

#: Seconds.
DELAY = 2.0

_use = Fleet.use


@asynccontextmanager
async def _use_slowly(fleet: Fleet, *args: Any, **named: Any) -> AsyncIterator[ModelChild]:
    async with _use(fleet, *args, **named) as child:
        await trio.sleep(DELAY)
        yield child


if __name__ == "__main__":
    if os.environ.get("LLAMA_SERVER_DEBUG_FAKE_TIMING"):
        Fleet.use = _use_slowly  # type: ignore[method-assign, assignment]
    sys.exit(main())
