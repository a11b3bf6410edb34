"""A request's place at a child: waiting for it, and keeping it until the answer has been sent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import TypeAlias

import trio

from trioserve.api.base import errors
from trioserve.errors import ModelProcessError, TrioServeError
from trioserve.models.catalog import ModelEntry
from trioserve.router.connected import connected
from trioserve.router.fleet import Fleet
from trioserve.router.forward import Connection, connect
from trioserve.router.states import Status, Waiting
from trioserve.server.concurrency import alongside

#: Writes where a request stands; None: it is not known yet.
Say: TypeAlias = Callable[[Waiting | None], bytes]


class Place:
    """The place of one request. Made by `place_at`.

    `waiting` is where the request stands, for as long as it waits, and `say` writes that.
    """

    def __init__(self, say: Say) -> None:
        self.waiting: Waiting | None = None
        self._say = say
        self._connection: Connection | None = None
        self._failure: TrioServeError | None = None
        self._decided = trio.Event()

    @property
    def decided(self) -> bool:
        """Whether there is a connection, or there will be none."""
        return self._decided.is_set()

    async def wait(self) -> None:
        """Wait until it is decided."""
        await self._decided.wait()

    async def connection(self) -> Connection:
        """Wait for a connection to the child. May be called again. Raises as `connected`."""
        await self._decided.wait()
        if self._failure is not None:
            raise self._failure
        assert self._connection is not None
        return self._connection

    def give(self, connection: Connection) -> None:
        """This is the connection."""
        self._connection = connection
        self._decided.set()

    async def keep(self, fleet: Fleet, entry: ModelEntry, *, autoload: bool) -> None:
        """Take a connection, and keep it until cancelled."""
        try:
            async with connected(fleet, entry, autoload=autoload, on_wait=self._note) as connection:
                self.give(connection)
                await trio.sleep_forever()
        except TrioServeError as error:
            self._failure = error
        except Exception as error:
            self._failure = errors.unexpected(error)
        self._decided.set()

    def _note(self, waiting: Waiting) -> None:
        self.waiting = waiting

    def comment(self) -> bytes:
        """Write where the request stands, for a stream that is silent meanwhile."""
        return self._say(self.waiting)

    async def beat(self) -> bytes:
        """Write the same as a ping; nothing once it is decided, because the child sends its own."""
        return b"" if self.decided else self.comment()


@asynccontextmanager
async def place_at(
    fleet: Fleet, entry: ModelEntry, say: Say, *, autoload: bool
) -> AsyncIterator[Place]:
    """Take a place at the child of a model for the length of the block, waiting aside for it."""
    place = Place(say)

    async def keep() -> None:
        await place.keep(fleet, entry, autoload=autoload)

    async with AsyncExitStack() as stack:
        if fleet.is_ready(entry):  # there is nothing to wait for, and so no need for a task
            child = await stack.enter_async_context(fleet.use(entry, autoload=autoload))
            with suppress(ModelProcessError):
                place.give(stack.enter_context(connect(child.socket_path, child.kept, child.ended)))
        if not place.decided:
            await stack.aclose()
            await stack.enter_async_context(alongside(keep))
        yield place


def comment_on(waiting: Waiting | None) -> bytes:
    """Write where a request stands, as a comment in a stream."""
    if waiting is None:
        return b":\n\n"
    if waiting.status in (Status.LOADING, Status.DOWNLOADING):
        share = "" if waiting.progress is None else f", {waiting.progress:.0%}"
        return f": {waiting.status} the model{share}\n\n".encode()
    return f": waiting for the model, position {waiting.position + 1}\n\n".encode()
