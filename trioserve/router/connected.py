"""Asking the process of a model, and the next one if that has died before it took the request."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

from trioserve.models.catalog import ModelEntry
from trioserve.router.fleet import Fleet
from trioserve.router.forward import Answer, Connection, connect
from trioserve.router.states import Waiting
from trioserve.router.wire import NotTakenError, Outgoing


@asynccontextmanager
async def connected(
    fleet: Fleet,
    entry: ModelEntry,
    *,
    autoload: bool = True,
    on_wait: Callable[[Waiting], None] | None = None,
) -> AsyncIterator[Connection]:
    """Wait until a model is ready, and connect to it; both for the length of the block.

    A process may have died a moment ago, and the fleet not know it yet. Nothing was sent to it
    then, so the request waits for the next one. Arguments are those of `Fleet.use`.

    Raises:
        TrioServeError: as `Fleet.use`; or the process takes no more connections.
    """
    while True:
        async with AsyncExitStack() as stack:
            child = await stack.enter_async_context(
                fleet.use(entry, autoload=autoload, on_wait=on_wait)
            )
            try:
                connection = stack.enter_context(
                    connect(child.socket_path, child.kept, child.ended)
                )
            except NotTakenError:
                pass
            else:
                yield connection
                return
        await child.ended.wait()


@asynccontextmanager
async def asked(
    fleet: Fleet,
    entry: ModelEntry,
    write: Callable[[], Awaitable[Outgoing]],
    *,
    on_wait: Callable[[Waiting], None] | None = None,
) -> AsyncIterator[Answer]:
    """Wait until a model is ready, and send it a request; gives the answer, once its head is there.

    Args:
        fleet: has the model.
        entry: the model.
        write: writes the request when the model is ready; again, if a process has not taken it.
        on_wait: as for `Fleet.use`.

    Raises:
        TrioServeError: as `connected`, and as `write`; the process ended before it had answered.
    """
    while True:
        async with connected(fleet, entry, on_wait=on_wait) as connection:
            try:
                answer = await connection.ask(await write())
            except NotTakenError:
                continue
            yield answer
            return
