"""Models that programs may call: those of a server that runs, or in processes of our own."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol, TypeAlias

import attrs

from trioserve.fair_limiter import current_client
from trioserve.models.catalog import find_for
from trioserve.remote.answers import Models
from trioserve.remote.client import ServerClient, connected_to
from trioserve.remote.server import AnyServer, RemoteServer
from trioserve.router.fleet import Fleet
from trioserve.router.models import PlacedLine, child_server
from trioserve.router.states import QueueStatus
from trioserve.server.keys import Keys

#: Takes a sentence that describes what a call is waiting for.
Tell: TypeAlias = Callable[[str], None]


@attrs.frozen
class Listed:
    """A model that may be named in a request."""

    name: str
    state: str


class ModelSource(Protocol):
    """Gives models. All raise TrioServeError."""

    def use(
        self, name: str | None, tell: Tell
    ) -> AbstractAsyncContextManager[tuple[str, AnyServer]]:
        """Take a model for a block; gives its name, too. None: the only one that there is."""

    async def listed(self) -> list[Listed]:
        """List the models."""


@attrs.frozen
class _OwnModels:
    """Models in processes that are started when they are first needed.

    Args:
        fleet: the processes.
        keys: of the processes. A call names its client, by its key or else its address, so that
            clients take turns there, and keys share no cache.
    """

    _fleet: Fleet
    _keys: Keys

    @asynccontextmanager
    async def use(self, name: str | None, tell: Tell) -> AsyncIterator[tuple[str, AnyServer]]:
        entry = find_for(self._keys.find(current_client()), self._fleet.catalog, name)

        def waits(waiting: QueueStatus | None) -> None:
            progress = None if waiting is None else waiting.progress
            share = "" if progress is None else f": {progress:.0%}"
            tell("" if waiting is None else f"Loading {entry.name}{share}")

        line = PlacedLine(self._fleet, entry, waits)
        yield entry.name, child_server(line, current_client())

    async def listed(self) -> list[Listed]:
        key = self._keys.find(current_client())
        names = [
            one.name
            for one in self._fleet.catalog.entries.values()
            if not one.hidden and (key is None or key.may_use(one.name, *one.aliases))
        ]
        return [Listed(name, self._fleet.state(name).value.value) for name in names]


@attrs.frozen
class _RemoteModels:
    """The models of a server, which finds them by their names."""

    _client: ServerClient

    @asynccontextmanager
    async def use(self, name: str | None, tell: Tell) -> AsyncIterator[tuple[str, AnyServer]]:
        if name is None and len(listed := await self.listed()) == 1:
            name = listed[0].name
        yield name or "", RemoteServer.over(self._client, name)

    async def listed(self) -> list[Listed]:
        models = await self._client.ask("/v1/models", form=Models)
        return [Listed(one.id, one.state) for one in models.data]


@asynccontextmanager
async def models_of_server(
    url: str, *, socket_path: str | None = None, api_key: str | None = None
) -> AsyncIterator[ModelSource]:
    """The models of a server that runs. Arguments are those of `connected_to`."""
    async with connected_to(url, socket_path=socket_path, api_key=api_key) as client:
        yield _RemoteModels(client)


@asynccontextmanager
async def models_of_fleet(fleet: Fleet, keys: Keys) -> AsyncIterator[ModelSource]:
    """The models of a fleet, whose processes have these keys. Leaving the block ends them."""
    async with fleet:
        yield _OwnModels(fleet, keys)
