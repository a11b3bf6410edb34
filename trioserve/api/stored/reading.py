"""Reads what is stored for the current request: counted in its memory before it is read, in pieces
between which other clients have their turns, and decoded in a thread if it is long.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.app_state import current_app_state
from trioserve.api.base.body import parse_json
from trioserve.api.base.connection import current_request
from trioserve.api.base.http import long_response
from trioserve.errors import InvalidRequestError
from trioserve.fair_limiter import offload
from trioserve.server.limits.memory import weight_of
from trioserve.store import Records, Ref, damaged

_T = TypeVar("_T")

#: Bytes that are decoded on the event loop.
_SHORT = 32 * 1024

#: Bytes of JSON that count as a number of a list, for `long_response`.
PER_NUMBER = 8


async def look_up(work: Callable[[Records], _T]) -> _T:
    """Run work that reads. Raises as `Store.do`, and what `MemoryBudget.take` raises."""
    return await current_app_state().store.do(work, current_request().held.grow)


async def bodies(refs: Sequence[Ref]) -> list[bytes]:
    """Read parts. Raises as `look_up`, and NotFoundError: one was deleted meanwhile."""
    parts = await current_app_state().store.read(refs, current_request().held.grow)
    return [part.body for part in parts]


async def values(data: Sequence[bytes]) -> list[Any]:
    """Decode what was read. Raises StoreError: it is damaged; MemoryFullError."""
    n_bytes = await _weigh(data)
    return await offload(partial(decoded, data), n_bytes, _SHORT)


async def respond(data: Sequence[bytes], make: Callable[[], Any]) -> Response:
    """Make a response of JSON with what was read, which `make` decodes. Raises as `values`."""
    await _weigh(data)  # beside what was read before
    return await long_response(make, current_request().held.n_bytes // PER_NUMBER)


async def _weigh(data: Sequence[bytes]) -> int:
    """Count the memory of values, and of one more text of them; returns the bytes."""
    n_bytes = sum(map(len, data))
    weight = await offload(lambda: sum(map(weight_of, data)), n_bytes, _SHORT)
    current_request().held.grow(weight)
    return n_bytes


def decoded(data: Sequence[bytes]) -> list[Any]:
    """Decode what was read, in the thread that calls this. Raises StoreError: it is damaged."""
    try:
        return [parse_json(each) for each in data]
    except InvalidRequestError:
        raise damaged() from None
