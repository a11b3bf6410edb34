"""`Prospects`: models that a fleet could have, and what it would need for them."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio

from trioserve.concurrency import deadline_scope
from trioserve.errors import InvalidRequestError, UnknownModelError
from trioserve.fair_limiter import FairLimiter
from trioserve.models import hub
from trioserve.models.catalog import ModelEntry, Source
from trioserve.models.hub import HubReference
from trioserve.router.fleet import Fleet, Needs

#: Estimates of all clients that may wait for their turn.
_MAX_WAITING = 16

#: Seconds that the hub may take for the headers of a model.
_PATIENCE = 120.0


class Prospects:
    """Looks for models on the hub, and estimates what a model would need, one at a time."""

    def __init__(self, fleet: Fleet, *, token: str | None = None) -> None:
        self._fleet = fleet
        self._token = token
        self._limiter = FairLimiter(1, max_waiting=_MAX_WAITING)

    async def search(self, words: str) -> list[hub.Repository]:
        """Find repositories; see `hub.search`."""
        return await hub.search(words, token=self._token)

    async def offers(self, repo: str) -> list[hub.Offer]:
        """List the models of a repository; see `hub.offers`."""
        return await hub.offers(repo, token=self._token)

    async def room(self) -> int | None:
        """The bytes of RAM that are free for models; None: not known."""
        return await self._fleet.room()

    async def needs(self, name: str, args: tuple[str, ...]) -> Needs:
        """Estimate the memory of a model, which need not be here yet.

        Args:
            name: that of a model of the fleet, or of one on the hub.
            args: flags beside those that it has.

        Raises:
            InvalidRequestError: this is no name of either.
            HubError: the hub does not have it, or cannot be asked.
            DeadlineExceededError: the hub is too slow.
            ModelLoadError: the model cannot be used.
            QueueFullError: too many estimates wait.
        """
        async with self._limiter.place():
            try:
                entry = self._fleet.catalog.exact(name)
            except UnknownModelError:
                async with self._sketched(HubReference.parse(name)) as entry:
                    return await self._needs(entry, args)
            if entry.upstream is not None:
                raise InvalidRequestError(
                    f"The model {name!r} is not on this machine.", param="model"
                )
            return await self._needs(entry, args)

    async def _needs(self, entry: ModelEntry, args: tuple[str, ...]) -> Needs:
        return await self._fleet.needs(attrs.evolve(entry, args=(*entry.args, *args)))

    @asynccontextmanager
    async def _sketched(self, reference: HubReference) -> AsyncIterator[ModelEntry]:
        folder = await trio.to_thread.run_sync(tempfile.TemporaryDirectory)
        try:
            until = trio.current_time() + _PATIENCE
            with deadline_scope(until, f"The hub sends {reference} too slowly."):
                places = await hub.sketch(reference, Path(folder.name), token=self._token)
            beside = next((one for one in places if "mmproj" in one.name), None)
            files = ["--model", str(places[0]), *(("--mmproj", str(beside)) if beside else ())]
            yield ModelEntry(
                name=str(reference), source=Source.CACHE, args=tuple(files), path=places[0]
            )
        finally:
            with trio.CancelScope(shield=True):
                await trio.to_thread.run_sync(folder.cleanup)
