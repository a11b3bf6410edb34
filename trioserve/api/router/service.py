"""`RouterService`: the life of a `Fleet` within the life of an app."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from typing import TypeAlias

import structlog
import trio
from quart import current_app
from trio_util import AsyncValue

from trioserve.api.base.intake import Intake, intake_of
from trioserve.api.router.metrics import RouterMetrics
from trioserve.config import Config
from trioserve.errors import (
    ModelLoadError,
    ServerClosingError,
    TrioServeError,
    UnavailableError,
)
from trioserve.models.catalog import GgufSummary, ModelEntry, describe
from trioserve.router.downloads import Downloads
from trioserve.router.fleet import Fleet
from trioserve.server.concurrency import alongside

_log = structlog.stdlib.get_logger("trioserve.api")

#: Seconds in which clients get what their models have sent last.
_FAREWELL = 3.0

#: Makes the fleet, when the service runs.
OpenFleet: TypeAlias = Callable[[], AbstractAsyncContextManager[Fleet]]


class RouterService(Intake):
    """Holds the `Fleet` of an app.

    Args:
        config: what the router itself serves. May be set until `run` is called.
        open_fleet: opens the models.
    """

    def __init__(self, config: Config, open_fleet: OpenFleet) -> None:
        super().__init__(config)
        #: Why there is no fleet.
        self.failure: TrioServeError | None = None
        #: Requests that are with a child, or wait for one.
        self.n_forwarded = AsyncValue(0)
        self.metrics = RouterMetrics()
        self._open_fleet = open_fleet
        self._fleet: Fleet | None = None
        self._downloads: Downloads | None = None
        self._summaries: dict[tuple[Path, object], GgufSummary | None] = {}
        self._scope = trio.CancelScope()
        self._stopping = False
        self._loaded = trio.Event()
        self._ended = trio.Event()

    @property
    def fleet(self) -> Fleet:
        """The models, for requests.

        Raises:
            ServerClosingError: the service is stopping.
            UnavailableError: it has not begun.
            TrioServeError: `failure`, when there is one.
        """
        if self.failure is not None:
            raise self.failure
        if self._stopping:
            raise ServerClosingError
        if self._fleet is None:
            raise UnavailableError("The router is starting.")
        return self._fleet

    @property
    def downloads(self) -> Downloads:
        """The models on their way to the fleet. Raises as `fleet`."""
        assert self.fleet is not None and self._downloads is not None
        return self._downloads

    async def summary_of(self, entry: ModelEntry) -> GgufSummary | None:
        """What the file of a model says; None when it is not there, or broken. Remembered."""
        if entry.path is None:
            return None
        key = (entry.path, entry.version)
        if key not in self._summaries:
            try:
                self._summaries[key] = await trio.to_thread.run_sync(describe, entry.path)
            except ModelLoadError:
                self._summaries[key] = None
        return self._summaries[key]

    async def wait_loaded(self) -> None:
        """Wait until requests are taken. Waits on when they cannot be."""
        await self._loaded.wait()

    async def wait_ended(self) -> None:
        """Wait until the service has ended, or could not begin; `failure` says why."""
        await self._ended.wait()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve the models until `stop` is called. Reports started once requests are taken.

        Raises:
            TrioServeError: whatever ends the fleet. Written to the log, and kept in `failure`.
        """
        try:
            with self._scope:
                async with (
                    self._open_fleet() as fleet,
                    alongside(self._own_memory.keep_trim),
                    alongside(partial(self.streams.run, self.config)),
                ):
                    self._fleet = fleet
                    self._downloads = Downloads(fleet, token=self.config.hf_token)
                    self._loaded.set()
                    task_status.started()
                    await self._downloads.run()
        except TrioServeError as error:
            self.failure = error
            _log.error(error.message)
            raise
        finally:
            self._fleet = None
            self._stopping = True
            self._ended.set()

    async def drain(self) -> None:
        """Take nothing new, and let the models finish what runs, within the `drain_timeout`."""
        self._stopping = True
        if self._fleet is not None:
            await self._fleet.drain()
        with trio.move_on_after(_FAREWELL):
            await self.n_forwarded.wait_value(0)

    async def stop(self) -> None:
        """End all models, if `run` was called, and wait until their processes have ended."""
        self._stopping = True
        self._scope.cancel()
        with trio.CancelScope(shield=True):
            await self._ended.wait()


def current_router() -> RouterService:
    """The service of the app that handles the current request."""
    service = intake_of(current_app)
    assert isinstance(service, RouterService)
    return service


def current_fleet() -> Fleet:
    """The models, for the current request. Raises as `RouterService.fleet`."""
    return current_router().fleet
