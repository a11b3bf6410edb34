"""`RouterService`: the life of a `Fleet` within the life of an app."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import msgspec
import trio
from trio_util import AsyncValue

from trioserve.api import metrics
from trioserve.api.base import reply
from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import Caller
from trioserve.api.base.described import (
    of_server,
    properties_of,
    properties_of_another,
    properties_of_many,
)
from trioserve.api.base.models import Card, Details, Loaded
from trioserve.api.base.reply import Data, Reply
from trioserve.api.base.routes import Responder, Route
from trioserve.api.router import files
from trioserve.api.router.lender import Lender
from trioserve.api.router.metrics import RouterMetrics, joined, of_models
from trioserve.api.router.upstreams import Upstreams, not_there
from trioserve.api.router.waiting import may_load, patient
from trioserve.concurrency import Feed, alongside, deadline_scope
from trioserve.config import Config
from trioserve.errors import InvalidRequestError
from trioserve.model_process.server import ChildServer
from trioserve.models.catalog import ModelEntry, find_for
from trioserve.router.child import ModelChild
from trioserve.router.downloads import Downloads
from trioserve.router.fleet import Fleet
from trioserve.router.prospects import Prospects
from trioserve.router.states import FleetEvent, ModelState
from trioserve.server.model import LoadedModel
from trioserve.server.model_server import ModelServer
from trioserve.server.observers.observer import RequestLog
from trioserve.tools.registry import open_registry
from trioserve.types import Modalities

#: Seconds in which clients get what their models have sent last.
_FAREWELL = 3.0

#: Seconds that a model may take to write its metrics: it waits 5 for a step to end, and Prometheus
#: waits 10 for everything. And seconds in which it says what it has in memory.
_PATIENCE, _WORD = 7.0, 1.0


#: Makes the fleet, when the service runs.
OpenFleet: TypeAlias = Callable[[], AbstractAsyncContextManager[Fleet]]


class RouterService(Lender):
    """Holds the `Fleet` of an app.

    Args:
        config: what the router itself serves. May be set until `run` is called.
        open_fleet: opens the models.
    """

    def __init__(self, config: Config, open_fleet: OpenFleet) -> None:
        self.counted = RouterMetrics()
        super().__init__(config, (RequestLog(), self.counted))
        #: Requests that are with a child, or wait for one.
        self.n_lent = AsyncValue(0)
        self._open_fleet = open_fleet
        self._fleet: Fleet | None = None
        self._downloads: Downloads | None = None
        self._upstreams: Upstreams | None = None
        self._prospects: Prospects | None = None
        self._files = files.Files()

    @property
    def fleet(self) -> Fleet:
        """The fleet that answers requests. Raises as `_there`, also while the app drains."""
        fleet = self._there(self._fleet)
        self.gate.check()
        return fleet

    def patient(self, route: Route, answer: Responder) -> Responder:
        """Have the streams of a route about a model say how they wait for it."""
        is_about_model = route.of_model and not route.about_answer
        return patient(self, route, answer) if is_about_model else answer

    async def use(self, name: str | None, caller: Caller) -> ModelServer:
        """Wait until a model is loaded, and keep it until the answer has been sent.

        Raises:
            InsufficientQuotaError: the API key has used up its tokens of this day.
            DeadlineExceededError: the request has waited for too long.
            TrioServeError: as `Fleet.use`, and as `find`.
        """
        entry = self.find(name or caller.model, caller, answers=True)
        if entry.upstream is not None:
            raise not_there(entry, caller.path)
        if (known := caller.servers.get(entry.name)) is not None:
            return known
        if caller.method == "POST":
            self.usage.check(caller.key)
        caller.enter(self.lent())
        with deadline_scope(caller.wait_until):
            using = self.fleet.use(entry, autoload=caller.may_load, on_wait=caller.on_wait)
            child = await caller.open(using)
        server = self._server_of(child)
        caller.servers[entry.name] = server
        return server

    def passing_on(self, entry: ModelEntry, route: Route) -> Responder:
        """Make the function that passes requests on to the upstream of a model."""

        async def answer(
            incoming: Incoming, caller: Caller, values: Mapping[str, str], **more: Any
        ) -> Reply:
            self.usage.check(caller.key)
            caller.enter(self.lent())
            return await self.upstreams.answer(entry, route, incoming, caller)

        return answer

    @property
    def upstreams(self) -> Upstreams:
        """The other servers. Raises as `fleet`."""
        self.gate.check()
        return self._there(self._upstreams)

    def state(self, entry: ModelEntry) -> ModelState:
        """The state of a model, here or at its upstream. Raises as `fleet`."""
        if entry.upstream is None:
            return self.fleet.state(entry.name)
        return self.upstreams.state(entry)

    def _server_of(self, child: ModelChild) -> ChildServer:
        assert child.config is not None
        return self.server_of(child.line, child.config)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Count a request that is with a child, or waits for one, for a block."""
        self.n_lent.value += 1
        try:
            yield
        finally:
            self.n_lent.value -= 1

    def find(
        self, name: str | None, caller: Caller, *, exact: bool = False, answers: bool = False
    ) -> ModelEntry:
        """Find the model that a request of a caller names. As `find_for` and `fleet`."""
        return find_for(caller.key, self.fleet.catalog, name, exact=exact, answers=answers)

    @property
    def prospects(self) -> Prospects:
        """The models that could be downloaded. Raises as `fleet`."""
        self._there(self._fleet)
        assert self._prospects is not None
        return self._prospects

    @property
    def downloads(self) -> Downloads:
        """The models on their way to the fleet. Raises as `fleet`."""
        assert self.fleet is not None and self._downloads is not None
        return self._downloads

    # -- the models

    def check_ready(self) -> None:
        _ = self.fleet

    def check_live(self) -> None:
        _ = self.fleet

    async def listed(self, caller: Caller, *, reload: bool = False) -> Sequence[dict[str, Any]]:
        fleet = self.fleet
        if reload:
            await fleet.reload()
            await self.upstreams.reload()
        here = (one for one in fleet.catalog.entries.values() if one.upstream is None)
        modalities = await self._files.modalities(here)
        listed = [
            self._described(one, modalities.get(one.name, Modalities()))
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
        entry = self.find(name, caller)
        found = await self._files.modalities([entry] if entry.upstream is None else [])
        return self._described(entry, found.get(entry.name, Modalities()))

    def _described(self, entry: ModelEntry, modalities: Modalities) -> dict[str, Any]:
        if entry.upstream is not None:
            n_ctx = self.upstreams.n_ctx(entry)
            info = {"context_length": n_ctx, "max_model_len": n_ctx} if n_ctx else {}
            return files.described(entry, self.state(entry), modalities, info)
        child = self.fleet.child(entry.name)
        known = child is not None and child.line.known.model is not None
        info = msgspec.to_builtins(of_server(self._server_of(child))) if child and known else {}
        return files.described(entry, self.state(entry), modalities, info)

    async def cards(self, caller: Caller) -> Sequence[Card]:
        here = [one for one in self._visible(caller) if one.path is not None]
        return [await self._files.card(one) for one in here]

    async def details(self, name: str, caller: Caller) -> Details:
        """Describe a model by its file, without loading it."""
        return await self._files.details(self.find(name, caller))

    async def in_memory(self, caller: Caller) -> Sequence[Loaded]:
        """Describe the models that are loaded. One that does not answer is left out.

        The question keeps none awake.
        """
        seconds = await of_models(self.fleet, _WORD, ModelServer.idle_seconds)
        return [
            Loaded(
                card=await self._files.card(one),
                n_ctx=model.n_ctx_seq,
                expires=time.time() + seconds[one.name] if seconds[one.name] < math.inf else None,
            )
            for one in self._visible(caller)
            if one.name in seconds and (model := self._model_in_memory(one)) is not None
        ]

    def _model_in_memory(self, entry: ModelEntry) -> LoadedModel | None:
        known = self.fleet.known(entry.name)
        return None if known.sleeping else known.model

    async def properties(self, query: Mapping[str, str], caller: Caller) -> Reply:
        if name := query.get("model"):
            if (entry := self.find(name, caller)).upstream is not None:
                n_ctx, apis = self.upstreams.n_ctx(entry), entry.upstream.apis
                return reply.json(properties_of_another(self.config, entry.name, n_ctx, apis))
            caller.may_load = may_load(self.config.models_autoload, query, caller)
            return reply.json(properties_of(await self.use(name, caller)))
        config, _ = self.config, self.fleet
        most, autoload = config.models_max, config.models_autoload
        return reply.json(properties_of_many(config, max_models=most, autoload=autoload))

    async def metrics(self, query: Mapping[str, str], caller: Caller) -> Reply:
        """Write the metrics of the router, and of the models that are loaded."""
        if name := query.get("model"):
            text = await self._measured(name, query, caller, as_json=False)
        else:
            metrics.check(self.config)
            own = self.counted.render(self._states()) + await metrics.render(self, caller)
            text = joined(own, await of_models(self.fleet, _PATIENCE, ModelServer.written_metrics))
        return Data(body=text.encode(), content_type=metrics.CONTENT_TYPE)

    def _states(self) -> dict[str, ModelState]:
        return {name: self.state(one) for name, one in self.fleet.catalog.entries.items()}

    async def snapshot(self, query: Mapping[str, str], caller: Caller) -> Reply:
        if name := query.get("model"):
            return reply.json(json.loads(await self._measured(name, query, caller, as_json=True)))
        metrics.check(self.config)
        found = await of_models(self.fleet, _PATIENCE, ModelServer.written_metrics, as_json=True)
        models = {name: json.loads(text) for name, text in found.items()}
        return reply.json({"object": "metrics", "models": models})

    async def _measured(
        self, name: str, query: Mapping[str, str], caller: Caller, *, as_json: bool
    ) -> str:
        """Write the metrics of a model. Raises NotSupportedError: it has no metrics."""
        caller.may_load = may_load(self.config.models_autoload, query, caller)
        server = await self.use(name, caller)
        metrics.check(server.config)
        return await server.written_metrics(as_json=as_json)

    async def load(self, name: str, caller: Caller, *, args: tuple[str, ...] = ()) -> None:
        """Begin to load a model."""
        await self.fleet.load(self._here(name, caller), args)

    async def unload(self, name: str, caller: Caller) -> None:
        """Begin to unload a model, or cancel its download."""
        if not (caller.may_use(name) and self.downloads.cancel(name)):
            await self.fleet.unload(self._here(name, caller, exact=True))

    def _here(self, name: str, caller: Caller, *, exact: bool = False) -> ModelEntry:
        """Find a model that runs here. Raises InvalidRequestError: it is another server's."""
        entry = self.find(name, caller, exact=exact)
        if entry.upstream is not None:
            raise InvalidRequestError(
                f"The model {entry.name!r} is at the upstream {entry.upstream.name!r}, which loads "
                "and unloads it.",
                param="model",
            )
        return entry

    async def download(self, name: str, caller: Caller, *, again: bool = False) -> str:
        caller.check_model(name)
        return await self.downloads.start(name, again=again)

    async def remove(self, name: str, caller: Caller) -> None:
        """Delete a model from the cache, and stop it if it runs."""
        await self.downloads.remove(self.find(name, caller, exact=True))

    def news(self) -> AbstractContextManager[Feed[FleetEvent]]:
        return self.fleet.events.subscribe()

    async def _serve(self, task_status: trio.TaskStatus[None]) -> None:
        async with (
            self._storing() as store,
            open_registry(self.config) as tools,
            self._open_fleet() as fleet,
            self._open_upstreams(fleet) as upstreams,
            alongside(self._own_memory.keep_trim),
            self._outliving(store, self.config),
        ):
            await tools.listed()
            self._fleet, self._tools, self._upstreams = fleet, tools, upstreams
            fleet.on_usage = self.usage.add_reported
            config = self.config
            self._downloads = Downloads(fleet, token=config.hf_token, limit=config.models_downloads)
            self._prospects = Prospects(fleet, token=config.hf_token)
            self._began(task_status, tools)
            await trio.sleep_forever()

    def _open_upstreams(self, fleet: Fleet) -> AbstractAsyncContextManager[Upstreams]:
        observers = (*self.observers, self.usage)
        return Upstreams(fleet.catalog, self.config, self.keys, observers)

    def _forget(self) -> None:
        super()._forget()
        self._fleet = self._upstreams = None

    async def drain(self) -> None:
        """Take nothing new, and let the models finish what runs, within the `drain_timeout`."""
        self.gate.refuse()
        deadline = trio.current_time() + self.config.drain_timeout
        self.tool_calls.gate.refuse()
        if self._fleet is not None:
            await self._fleet.drain()
        if self._upstreams is not None:
            with trio.CancelScope(deadline=deadline):
                await self._upstreams.until_idle()
        await self.tool_calls.drain(deadline)
        with trio.move_on_after(_FAREWELL):
            await self.n_lent.wait_value(0)
