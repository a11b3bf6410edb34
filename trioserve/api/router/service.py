"""`RouterService`: the life of a `Fleet` within the life of an app."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from datetime import datetime
from typing import Any, TypeAlias

import attrs
import trio
from msgspec import Struct
from msgspec.json import decode
from trio_util import AsyncValue

from trioserve.api import metrics
from trioserve.api.base import reply
from trioserve.api.base.caller import Caller
from trioserve.api.base.described import properties_of_many
from trioserve.api.base.models import Card, Details, Loaded
from trioserve.api.base.reply import Data, Reply
from trioserve.api.base.routes import Responder, Route
from trioserve.api.router import files
from trioserve.api.router.forwarding import Forwarder, question
from trioserve.api.router.metrics import RouterMetrics, joined, of_models
from trioserve.api.service import AppState
from trioserve.concurrency import Feed, alongside
from trioserve.config import Config
from trioserve.models.catalog import ModelEntry, find_for
from trioserve.router.downloads import Downloads
from trioserve.router.fleet import Fleet
from trioserve.router.states import FleetEvent, Status
from trioserve.server.model_server import ModelServer
from trioserve.server.observers.observer import Observer, RequestLog
from trioserve.tools.registry import ToolRegistry, open_registry
from trioserve.types import Modalities

#: Seconds in which clients get what their models have sent last.
_FAREWELL = 3.0

#: Seconds that a model may take to write its metrics: it waits 5 for a step to end, and Prometheus
#: waits 10 for everything. And seconds in which it says what it has in memory.
_PATIENCE, _WORD = 7.0, 1.0


class _Process(Struct):
    expires_at: datetime
    context_length: int


class _Processes(Struct):
    """What a process answers to Ollama's question for what is in memory."""

    models: list[_Process]


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
        self.counted = RouterMetrics()
        self.forwards = True
        #: Answers the routes about requests to models.
        self.forwarder = Forwarder(self)
        self._observers = (RequestLog(), self.counted)
        self._open_fleet = open_fleet
        self._fleet: Fleet | None = None
        self._tools: ToolRegistry | None = None
        self._downloads: Downloads | None = None
        self._files = files.Files()

    @property
    def fleet(self) -> Fleet:
        """The fleet that answers requests. Raises as `_there`, also while the app drains."""
        fleet = self._there(self._fleet)
        self.gate.check()
        return fleet

    def answer_of(self, route: Route) -> Responder:
        """Make the function that answers a route: its handler, or the process of a model."""
        return self.forwarder.answer_of(route) if route.of_model else route.answered_by(self)

    async def use(self, name: str | None, caller: Caller) -> ModelServer:
        """Refuse to give a model: the process of each has the routes about it."""
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
        """Find the model that a request of a caller names. As `find_for` and `fleet`."""
        return find_for(caller.key, self.fleet.catalog, name, exact=exact)

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

    # -- the models

    def check_ready(self) -> None:
        """Check that requests are taken. Raises as `fleet`."""
        _ = self.fleet

    def check_live(self) -> None:
        """Check that nothing is broken for good. Raises as `fleet`."""
        _ = self.fleet

    async def listed(self, caller: Caller, *, reload: bool = False) -> Sequence[dict[str, Any]]:
        """Describe the models, and those that are being downloaded."""
        fleet = self.fleet
        if reload:
            await fleet.reload()
        entries = fleet.catalog.entries
        modalities = await self._files.modalities(entries.values())
        listed = [
            files.described(one, fleet.state(one.name), modalities.get(one.name, Modalities()))
            for one in self._visible(caller)
        ]
        coming = self.downloads.running
        new = filter(caller.may_use, coming.keys() - fleet.catalog.entries)
        return [*listed, *(files.download(name, coming[name].progress()) for name in new)]

    def _visible(self, caller: Caller) -> Iterator[ModelEntry]:
        for one in self.fleet.catalog.entries.values():
            if not one.hidden and caller.may_use(one.name, *one.aliases):
                yield one

    async def describe(self, name: str, caller: Caller) -> dict[str, Any]:
        """Describe a model by its state and its files."""
        entry = self.find(name, caller)
        modalities = (await self._files.modalities([entry]))[entry.name]
        return files.described(entry, self.fleet.state(entry.name), modalities)

    async def cards(self, caller: Caller) -> Sequence[Card]:
        """Describe the models whose files are here."""
        here = [one for one in self._visible(caller) if one.path is not None]
        return [await self._files.card(one) for one in here]

    async def details(self, name: str, caller: Caller) -> Details:
        """Describe a model by its file, without loading it."""
        return await self._files.details(self.find(name, caller))

    async def in_memory(self, caller: Caller) -> Sequence[Loaded]:
        """Describe the models that are loaded, as the process of each tells it.

        One that has ended or is busy with something is left out. The question keeps none awake.
        """
        found = await self._ask_all("/api/ps", caller, patience=_WORD)
        told = {name: decode(body, type=_Processes).models for name, body in found.items()}
        return [
            Loaded(
                card=await self._files.card(one),
                n_ctx=process.context_length,
                expires=process.expires_at.timestamp(),
            )
            for one in self._visible(caller)
            if self.fleet.state(one.name).value is Status.LOADED
            for process in told.get(one.name, ())
        ]

    async def _ask_all(
        self, path: str, caller: Caller, *, patience: float = _PATIENCE
    ) -> Mapping[str, bytes]:
        """Ask a question of a caller of all models that are loaded; see `of_models`."""
        asked = attrs.evolve(question(path, caller), method="GET")
        return await of_models(self.fleet, asked, patience)

    async def properties(self, query: Mapping[str, str], caller: Caller) -> Reply:
        """Describe the router, or a model."""
        if query.get("model"):
            return await self.forwarder.of_model("/props", query, caller)
        config, _ = self.config, self.fleet
        most, autoload = config.models_max, config.models_autoload
        return reply.json(properties_of_many(config, max_models=most, autoload=autoload))

    async def metrics(self, query: Mapping[str, str], caller: Caller) -> Reply:
        """Write the metrics of the router, and of the models that are loaded."""
        if query.get("model"):
            return await self.forwarder.of_model("/metrics", query, caller)
        metrics.check(self.config)
        own = self.counted.render(self.fleet) + await metrics.render(self, caller)
        found = await self._ask_all("/metrics", caller)
        text = joined(own, found)
        return Data(body=text.encode(), content_type=metrics.CONTENT_TYPE)

    async def snapshot(self, query: Mapping[str, str], caller: Caller) -> Reply:
        """Write those of the models as one JSON object."""
        if query.get("model"):
            return await self.forwarder.of_model("/v1/metrics", query, caller)
        metrics.check(self.config)
        found = await self._ask_all("/v1/metrics", caller)
        models = {name: json.loads(text) for name, text in found.items()}
        return reply.json({"object": "metrics", "models": models})

    async def load(self, name: str, caller: Caller) -> None:
        """Begin to load a model."""
        await self.fleet.load(self.find(name, caller))

    async def unload(self, name: str, caller: Caller) -> None:
        """Begin to unload a model, or cancel its download."""
        if not (caller.may_use(name) and self.downloads.cancel(name)):
            await self.fleet.unload(self.find(name, caller, exact=True))

    async def download(self, name: str, caller: Caller, *, again: bool = False) -> str:
        """Begin to download a model."""
        caller.check_model(name)
        return await self.downloads.start(name, again=again)

    async def remove(self, name: str, caller: Caller) -> None:
        """Delete a model from the cache, and stop it if it runs."""
        await self.downloads.remove(self.find(name, caller, exact=True))

    def news(self) -> AbstractContextManager[Feed[FleetEvent]]:
        """Follow the fleet. As `fleet`."""
        return self.fleet.subscribe()

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
