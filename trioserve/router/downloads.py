"""`Downloads`: models on their way from the hub, for a fleet that has them afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import attrs
import trio

from trioserve.errors import (
    HubError,
    InvalidRequestError,
    PermissionDeniedError,
    TooManyRequestsError,
    TrioServeError,
)
from trioserve.log import get_logger
from trioserve.models import hub
from trioserve.models.catalog import ModelEntry, Source
from trioserve.models.hub import DownloadProgress, HubReference
from trioserve.router.fleet import Fleet
from trioserve.router.states import FleetEvent

_log = get_logger("trioserve.router")

#: Seconds after which a client that was refused may ask again.
_RETRY_AFTER = 10.0


@attrs.define(eq=False)
class Download:
    """One that is running. `files` has the bytes that have come and all bytes, by address."""

    reference: HubReference
    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    files: dict[str, tuple[int, int]] = attrs.field(factory=dict)

    def progress(self) -> dict[str, dict[str, int]]:
        """Write how far it is, as llama-server does."""
        return {url: {"done": done, "total": total} for url, (done, total) in self.files.items()}


class Downloads:
    """Downloads models that are asked for, each of them once at a time.

    Args:
        fleet: runs the downloads, and rescans and announces models when one was added or removed.
        limit: how many may run at the same time; 0: clients may not begin any.
    """

    def __init__(self, fleet: Fleet, *, token: str | None = None, limit: int = 3) -> None:
        self._fleet = fleet
        self._token = token
        self._limit = limit
        self._n_looked_up = 0  # whose models the hub is being asked for
        self._running: dict[str, Download] = {}

    @property
    def running(self) -> Mapping[str, Download]:
        """The downloads by the names of their models."""
        return self._running

    async def start(self, text: str, *, again: bool = False) -> str:
        """Begin to download a model, if the hub has it; returns its name.

        One that is here already is brought up to date with `again`. A download that is cancelled,
        or that ends with the router, is resumed by the next one.

        Raises:
            InvalidRequestError: this is no name on the hub; or the model is here, without `again`.
            HubError: the hub does not have it, or cannot be asked.
            PermissionDeniedError: clients may not begin downloads.
            TooManyRequestsError: too many run.
            ServerClosingError: the fleet is closing.
        """
        reference = HubReference.parse(text)
        for name, download in self._running.items():
            if download.reference == reference:
                return name
        if self._limit == 0:
            raise PermissionDeniedError("This router does not download models for its clients.")
        if len(self._running) + self._n_looked_up >= self._limit:
            raise TooManyRequestsError(
                f"{self._limit} models are being downloaded, as many as --models-downloads allows.",
                retry_after=_RETRY_AFTER,
            )
        self._n_looked_up += 1
        try:
            name = (await hub.look_up(reference, token=self._token)).name
        finally:
            self._n_looked_up -= 1
        if name in self._running:
            return name
        if name in self._fleet.catalog.entries and not again:
            raise InvalidRequestError(f"The model {name!r} is here already.", param="model")
        download = Download(reference)
        self._fleet.begin(partial(self._download, name, download), partial(self._failed, name))
        self._running[name] = download
        return name

    def cancel(self, name: str) -> bool:
        """End a download. Returns whether there was one; the next one resumes it."""
        if (download := self._running.get(name)) is None:
            return False
        download.scope.cancel()
        return True

    async def remove(self, entry: ModelEntry) -> None:
        """Delete a model from the cache, and stop it if it runs.

        Raises:
            InvalidRequestError: it is not from the cache.
            HubError: it cannot be deleted.
        """
        if entry.source is not Source.CACHE:
            raise InvalidRequestError(
                f"The model {entry.name!r} was not downloaded, so it is not deleted.",
                param="model",
            )
        with trio.CancelScope(shield=True):  # what is deleted is gone, if the client leaves, too
            await trio.to_thread.run_sync(hub.remove, HubReference.parse(entry.name))
            await self._fleet.reload()
            self._fleet.events.tell(FleetEvent(model=entry.name, event="model_remove"))

    async def _download(self, name: str, download: Download) -> None:
        note = partial(self._note, name, download)
        try:
            with download.scope:
                await hub.pull(download.reference, token=self._token, on_progress=note)
                await self._fleet.reload()
        finally:
            del self._running[name]
        if download.scope.cancelled_caught:
            raise HubError(f"The download of {name!r} was ended.")
        self._fleet.events.tell(FleetEvent(model=name, event="download_finished"))

    def _failed(self, name: str, error: TrioServeError) -> None:
        _log.warning("download failed", model=name, reason=error.message)
        event = FleetEvent(model=name, event="download_failed", data={"message": error.message})
        self._fleet.events.tell(event)

    def _note(self, name: str, download: Download, progress: DownloadProgress) -> None:
        download.files[progress.url] = (progress.done, progress.total)
        data = download.progress()
        self._fleet.events.tell(FleetEvent(model=name, event="download_progress", data=data))
