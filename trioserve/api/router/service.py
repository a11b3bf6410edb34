"""`RouterService`: the life of a `Fleet` within the life of an app."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import TypeAlias

import trio
from trio_util import AsyncValue

from trioserve.api.base.caller import Caller
from trioserve.api.base.routes import Responder, Route
from trioserve.api.router.forwarding import Forwarder
from trioserve.api.router.metrics import RouterMetrics
from trioserve.api.service import AppState
from trioserve.concurrency import alongside
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import (
    AmbiguousModelError,
    ModelLoadError,
    TrioServeError,
    UnknownModelError,
)
from trioserve.models import resolve_projector
from trioserve.models.catalog import GgufSummary, ModelEntry, describe, modalities_in
from trioserve.router.downloads import Downloads
from trioserve.router.fleet import Fleet
from trioserve.server import Server
from trioserve.server.observers.observer import Observer, RequestLog
from trioserve.tools.registry import ToolRegistry, open_registry
from trioserve.types import Modalities

#: Seconds in which clients get what their models have sent last.
_FAREWELL = 3.0

#: Makes the fleet, when the service runs.
OpenFleet: TypeAlias = Callable[[], AbstractAsyncContextManager[Fleet]]


class RouterService(AppState):
    """Holds the `Fleet` of an app.

    Args:
        config: what the router itself serves. May be set until `run` is called.
        open_fleet: opens the models.
    """

    def __init__(self, config: Config, open_fleet: OpenFleet) -> None:
        super().__init__(config)
        #: Requests that are with a child, or wait for one.
        self.n_forwarded = AsyncValue(0)
        self.metrics = RouterMetrics()
        self.forwards = True
        #: Answers the routes about requests to models.
        self.forwarder = Forwarder(self)
        self._observers = (RequestLog(), self.metrics)
        self._open_fleet = open_fleet
        self._fleet: Fleet | None = None
        self._tools: ToolRegistry | None = None
        self._downloads: Downloads | None = None
        self._summaries: dict[ModelEntry, GgufSummary | None] = {}
        self._modalities: dict[ModelEntry, Modalities] = {}

    @property
    def fleet(self) -> Fleet:
        """The fleet that answers requests. Raises as `_there`, also while the app drains."""
        fleet = self._there(self._fleet)
        self.gate.check()
        return fleet

    def answer_of(self, route: Route) -> Responder:
        """Make the function that answers a route: its handler, or the process of a model."""
        return self.forwarder.answer_of(route) if route.of_model else route.answered_by(self)

    def use(self, name: str | None, caller: Caller) -> Server:
        """Refuse to give a model: each is in a process of its own, which has its routes."""
        raise NotImplementedError("the process of a model has the routes about it")

    @contextmanager
    def forwarded(self) -> Iterator[None]:
        """Count a request that is with a child, or waits for one, for a block."""
        self.n_forwarded.value += 1
        try:
            yield
        finally:
            self.n_forwarded.value -= 1

    def find(self, name: str | None, caller: Caller, *, exact: bool = False) -> ModelEntry:
        """Find the model that a request names.

        Args:
            name: what it says; None: nothing.
            caller: who asks.
            exact: the name must be whole, as for what unloads or deletes the model.

        Raises:
            UnknownModelError: there is no such model.
            AmbiguousModelError: the name may mean several.
            PermissionDeniedError: the API key may not use it.
            TrioServeError: as `fleet`.
        """
        catalog, key = self.fleet.catalog, caller.key
        try:
            entry = catalog.exact(name or "") if exact else catalog.find(name)
        except (UnknownModelError, AmbiguousModelError) as error:
            if key is None or key.models is None:
                raise
            # The message lists models that the key does not see.
            raise type(error)(
                f"{name!r} is not the name of a model that this API key may use."
                if name
                else "The request must name a model that this API key may use.",
                param="model",
            ) from None
        caller.check_model(entry.name, *entry.aliases)
        return entry

    @property
    def tools(self) -> ToolRegistry:
        """The tools of the router itself, for clients; those of models are theirs. As `fleet`."""
        assert self.fleet is not None and self._tools is not None
        return self._tools

    @property
    def observers(self) -> Sequence[Observer]:
        """The log, and the metrics."""
        return self._observers

    @property
    def downloads(self) -> Downloads:
        """The models on their way to the fleet. Raises as `fleet`."""
        assert self.fleet is not None and self._downloads is not None
        return self._downloads

    async def summary_of(self, entry: ModelEntry) -> GgufSummary | None:
        """What the file of a model says; None when it is not there, or broken. Remembered."""
        if entry.path is None:
            return None
        if entry not in self._summaries:
            try:
                self._summaries[entry] = await trio.to_thread.run_sync(describe, entry.path)
            except ModelLoadError:
                self._summaries[entry] = None
        return self._summaries[entry]

    async def modalities_of(self, entries: Iterable[ModelEntry]) -> Mapping[str, Modalities]:
        """What models take beside text, by their files, which need not be there. Remembered."""
        entries = list(entries)
        if new := [one for one in entries if one not in self._modalities]:
            found = await trio.to_thread.run_sync(lambda: [_modalities_of(one) for one in new])
            self._modalities.update(zip(new, found, strict=True))
        return {one.name: self._modalities[one] for one in entries}

    async def _serve(self, task_status: trio.TaskStatus[None]) -> None:
        async with (
            self._storing() as store,
            open_registry(self.config) as tools,
            self._open_fleet() as fleet,
            alongside(self._own_memory.keep_trim),
            self._outliving(store, self.config),
        ):
            await tools.listed()
            self._fleet, self._tools = fleet, tools
            fleet.on_usage = self.usage.add_told
            config = self.config
            self._downloads = Downloads(fleet, token=config.hf_token, limit=config.models_downloads)
            self._began(task_status, tools)
            await trio.sleep_forever()

    def _forget(self) -> None:
        self._fleet = None

    async def drain(self) -> None:
        """Take nothing new, and let the models finish what runs, within the `drain_timeout`."""
        self.gate.refuse()
        deadline = trio.current_time() + self.config.drain_timeout
        self.tool_calls.gate.refuse()
        if self._fleet is not None:
            await self._fleet.drain()
        await self.tool_calls.drain(deadline)
        with trio.move_on_after(_FAREWELL):
            await self.n_forwarded.wait_value(0)


def _modalities_of(entry: ModelEntry) -> Modalities:
    try:
        config = parse(entry.args, {}).config
        return Modalities() if config.reranking else modalities_in(resolve_projector(config))
    except TrioServeError:  # loading it raises the same error
        return Modalities()
