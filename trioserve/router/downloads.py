"""`Downloads`: models on their way from the hub, for a fleet that has them afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import attrs
import structlog
import trio

from trioserve.errors import InvalidRequestError, TrioServeError, UnavailableError
from trioserve.models import hub
from trioserve.models.catalog import ModelEntry, Source
from trioserve.models.hub import DownloadProgress, HubReference
from trioserve.router.fleet import Fleet
from trioserve.router.states import FleetEvent

_log = structlog.stdlib.get_logger("trioserve.router")


@attrs.define(eq=False)
class Download:
    """One that is running. `files` has the bytes that have come and all bytes, by address."""

    scope: trio.CancelScope = attrs.field(factory=trio.CancelScope)
    files: dict[str, tuple[int, int]] = attrs.field(factory=dict)

    def progress(self) -> dict[str, dict[str, int]]:
        """Write how far it is, as llama-server does."""
        return {url: {"done": done, "total": total} for url, (done, total) in self.files.items()}


class Downloads:
    """Downloads models that are asked for, each of them once at a time.

    `run` has to be running.

    Args:
        fleet: rescans and announces models when one was added or removed.
        token: authenticates at the hub; None: that of the environment.
    """

    def __init__(self, fleet: Fleet, *, token: str | None = None) -> None:
        self._fleet = fleet
        self._token = token
        self._running: dict[str, Download] = {}
        self._nursery: trio.Nursery | None = None

    @property
    def running(self) -> Mapping[str, Download]:
        """The downloads by the names of their models."""
        return self._running

    async def run(self) -> None:
        """Keep downloading until cancelled. The next download continues what is unfinished."""
        try:
            async with trio.open_nursery() as self._nursery:
                await trio.sleep_forever()
        finally:
            self._nursery = None

    async def start(self, text: str, *, again: bool = False) -> str:
        """Begin to download a model, if the hub has it; returns its name.

        One that is here already is brought up to date with `again`.

        Raises:
            InvalidRequestError: this is no name on the hub; or the model is here, without `again`.
            HubError: the hub does not have it, or cannot be asked.
            UnavailableError: there are no downloads now.
        """
        reference = HubReference.parse(text)
        name = (await hub.look_up(reference, token=self._token)).name
        if name in self._running:
            return name
        if name in self._fleet.catalog.entries and not again:
            raise InvalidRequestError(f"The model {name!r} is here already.", param="model")
        if self._nursery is None:
            raise UnavailableError("The router takes no downloads now.")
        download = self._running[name] = Download()
        self._nursery.start_soon(self._download, name, reference, download)
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
        await trio.to_thread.run_sync(hub.remove, HubReference.parse(entry.name))
        await self._fleet.reload()
        self._fleet.tell(FleetEvent(model=entry.name, event="model_remove"))

    async def _download(self, name: str, reference: HubReference, download: Download) -> None:
        note = partial(self._note, name, download)
        failure = f"The download of {name!r} was ended."
        try:
            with download.scope:
                await hub.pull(reference, token=self._token, on_progress=note)
                await self._fleet.reload()
                failure = ""
        except TrioServeError as error:
            failure = error.message
        finally:
            del self._running[name]
        if failure:
            _log.warning("download failed", model=name, reason=failure)
            event = FleetEvent(model=name, event="download_failed", data={"message": failure})
        else:
            event = FleetEvent(model=name, event="download_finished")
        self._fleet.tell(event)

    def _note(self, name: str, download: Download, progress: DownloadProgress) -> None:
        download.files[progress.url] = (progress.done, progress.total)
        data = download.progress()
        self._fleet.tell(FleetEvent(model=name, event="download_progress", data=data))
