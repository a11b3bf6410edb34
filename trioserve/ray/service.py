"""`RayState`: the app of an ingress. The same handlers answer as elsewhere, with lent replicas."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack
from functools import partial
from typing import Any, NoReturn

import attrs
import msgspec
import trio

from trioserve.api import metrics
from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import Caller
from trioserve.api.base.described import (
    adapters_of,
    names as listed_as,
    of_server,
    properties_of,
    properties_of_many,
)
from trioserve.api.base.models import Card, Details, Loaded
from trioserve.api.base.reply import Data, Reply, json as json_reply, value_of
from trioserve.api.base.routes import Responder, Route
from trioserve.api.router.lender import Lender
from trioserve.api.router.metrics import label, merged
from trioserve.api.router.waiting import fields_of
from trioserve.api.service import card_of, details_of
from trioserve.concurrency import Feed, alongside
from trioserve.config import Config
from trioserve.config.keys import check_model
from trioserve.errors import ModelProcessError, NotFoundError, NotSupportedError, TrioServeError
from trioserve.model_process.connection import ask
from trioserve.model_process.server import ChildServer
from trioserve.ray.prefix_affinity import RoutingHint, hint_of
from trioserve.ray.replicas import ModelTarget, NoReplicaError, Replicas
from trioserve.router.prospects import Prospects
from trioserve.router.states import FleetEvent
from trioserve.server.model_server import ModelServer
from trioserve.server.observers.observer import RequestLog
from trioserve.tools.registry import open_registry

#: Replicas that may die while they have a request: it may be what they die of.
_MAX_LOST = 2

#: Seconds in which each replica has to take a question to all; for a list, one of each model.
_PATIENCE = 5.0
_LIST_PATIENCE = 2.0

#: In a query: the name of the replica that is meant.
_REPLICA = "replica"

_ONE, _SLOTS, _READY = (
    "/slots/<id_slot>",
    "/slots",
    frozenset({"/health", "/v1/health", "/health/ready"}),
)

#: Routes about the state of one replica, or of each.
_OF_EACH = frozenset(
    {_ONE, _SLOTS, "/lora-adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
)

_ANY = RoutingHint()


class RayState(Lender):
    """Answers with replicas."""

    def __init__(self, config: Config, replicas: Replicas) -> None:
        super().__init__(config, (RequestLog(),))
        self._replicas = replicas
        replicas.on_usage = self.usage.add_reported

    # -- requests

    def answer_of(self, route: Route) -> Responder:
        """Make the function that answers a route: its handler does, if a model is there."""
        answer = super().answer_of(route)
        if route.path not in _READY:
            return answer

        async def ready(
            incoming: Incoming, caller: Caller, values: Mapping[str, str], **more: Any
        ) -> Reply:
            found = (await self._servers(self._replicas)).values()
            errors = [each for each in found if isinstance(each, TrioServeError)]
            if len(errors) == len(found):
                raise errors[0]
            return await answer(incoming, caller, values, **more)

        return ready

    def patient(self, route: Route, answer: Responder) -> Responder:
        """Have the replica answer a route where the prompt's beginning is cached.

        What has no answer yet when its replica dies goes to another one.
        """
        if not route.of_model or route.about_answer:
            return answer

        async def lent(
            incoming: Incoming, caller: Caller, values: Mapping[str, str], **more: Any
        ) -> Reply:
            fields = await fields_of(route, incoming)
            caller.model = route.model_in(fields, incoming.query)
            target = self._find(caller.model, caller)
            work = partial(answer, incoming, values=values, **more)
            if route.path == _SLOTS or (route.path in _OF_EACH and incoming.method == "POST"):
                return await self._of_each(route, target, incoming, caller, work)
            hint = hint_of(fields, route.prompt_fields)
            for n_lost in range(1, _MAX_LOST + 1):
                try:
                    return await self._lent(target, caller, hint, work)
                except ModelProcessError:
                    if n_lost == _MAX_LOST:
                        raise
            raise AssertionError

        return lent

    async def _lent(
        self,
        target: ModelTarget,
        caller: Caller,
        hint: RoutingHint,
        work: Callable[..., Awaitable[Reply]],
        patience: float | None = None,
    ) -> Reply:
        """Answer with a replica, which is kept until the answer has been sent."""
        stack = await caller.open(AsyncExitStack())
        own = attrs.evolve(caller, resources=stack, servers={})
        caller.limits_left = lambda: own.limits_left()
        try:
            await self._lend(target, own, hint, patience)
            return await work(caller=own)
        except TrioServeError:
            await stack.aclose()
            raise

    async def _lend(
        self, target: ModelTarget, caller: Caller, hint: RoutingHint, patience: float | None = None
    ) -> ChildServer:
        line = await caller.open(self._replicas.lease(target, hint, patience))
        server = self.server_of(line, target.config)
        caller.servers[target.name] = server
        return server

    def _find(self, name: str | None, caller: Caller) -> ModelTarget:
        """Find a model that a caller may use. Raises as `Replicas.find`, PermissionDeniedError."""
        target = self._replicas.find(name, self.config)
        check_model(caller.key, target.name, *target.aliases)
        return target

    async def use(self, name: str | None, caller: Caller) -> ChildServer:
        """Take a replica of a model, unless the request has one, until the answer has been sent.

        Raises:
            NoReplicaError: no replica takes the request.
            TrioServeError: as `Replicas.find`.
        """
        target = self._find(name or caller.model, caller)
        server = caller.servers.get(target.name) or await self._lend(target, caller, _ANY)
        assert isinstance(server, ChildServer)
        return server

    # -- states that each replica has alone

    async def _of_each(
        self,
        route: Route,
        target: ModelTarget,
        incoming: Incoming,
        caller: Caller,
        work: Callable[..., Awaitable[Reply]],
    ) -> Reply:
        """Have all replicas answer, or the one that is named. GET /slots lists those of all."""
        name = incoming.query.get(_REPLICA)
        if name is None and target.is_single:
            return await self._lent(target, caller, _ANY, work)
        if name is not None:
            if name not in await self._names(target, route.path):
                raise NotFoundError(f"There is no replica {name!r}.", param=_REPLICA)
            return await self._lent(target, caller, RoutingHint(key=name), work)
        if route.path == _ONE or incoming.query.get("queue"):
            raise NotSupportedError(
                f"{incoming.path} is about the state of one server, and the model {target.name!r} "
                f"is served by several. Name one with ?{_REPLICA}=; GET /slots lists them."
            )
        data = await incoming.receive() if route.takes_bytes else b""

        async def again() -> bytes:
            return data

        incoming.receive = again

        async def one(hint: RoutingHint) -> tuple[Reply, Any]:
            reply = await self._lent(target, caller, hint, work, _PATIENCE)
            make, _ = await value_of(reply)
            return reply, make()

        found = await self._broadcast(target, route.path, one)
        if route.path != _SLOTS:
            first: Reply = next(iter(found.values()))[0]
            return first
        slots = ((name, slot) for name, (_, some) in found.items() for slot in some)
        return json_reply([{**msgspec.to_builtins(slot), _REPLICA: name} for name, slot in slots])

    async def _broadcast(
        self, target: ModelTarget, path: str, work: Callable[[RoutingHint], Awaitable[Any]]
    ) -> dict[str, Any]:
        """Ask all replicas of a model; gives the answers by their names.

        One that is lost meanwhile is left out, unless it is the last.

        Raises:
            TrioServeError: an answer is an error, or none answers.
        """
        found: dict[str, Any] = {}
        lost: TrioServeError | None = None
        for name in await self._names(target, path):
            try:
                found[name] = await work(RoutingHint(key=name or None))
            except (ModelProcessError, NoReplicaError) as error:
                lost = error
        if not found and lost is not None:
            raise lost
        return found

    async def _names(self, target: ModelTarget, path: str) -> Sequence[str]:
        """The names of the replicas of a model. The only one may have none.

        Raises:
            NotSupportedError: they are not known.
        """
        if not target.replicas():  # nothing was asked of any yet
            async with self._replicas.lease(target, _ANY, _PATIENCE):
                pass
        names = target.replicas()
        if not names and not target.is_single:
            raise NotSupportedError(
                f"{path} needs the router of requests, which knows the replicas. This "
                "application was built with router=False."
            )
        return names or ("",)

    # -- all models

    async def _servers(
        self, targets: Iterable[ModelTarget]
    ) -> dict[str, ChildServer | TrioServeError]:
        """A replica of each model, or the error of one that has none soon."""
        found: dict[str, ChildServer | TrioServeError] = {}

        async def find(target: ModelTarget) -> None:
            try:
                async with self._replicas.lease(target, _ANY, _LIST_PATIENCE) as line:
                    found[target.name] = self.server_of(line, target.config)
            except TrioServeError as error:
                found[target.name] = error

        targets = list(targets)
        async with trio.open_nursery() as nursery:
            for target in targets:
                nursery.start_soon(find, target)
        return {target.name: found[target.name] for target in targets}

    def _visible(self, caller: Caller) -> Iterator[ModelTarget]:
        return (one for one in self._replicas if caller.may_use(one.name, *one.aliases))

    def check_ready(self) -> None:
        """Check that this ingress takes requests. Raises as `tools`."""
        _ = self.tools

    def check_live(self) -> None:
        """Check that this ingress lives. Serve checks the replicas. Raises as `tools`."""
        _ = self.tools

    async def listed(self, caller: Caller, *, reload: bool = False) -> Sequence[Any]:
        """Describe the models and their LoRA adapters. One without a replica has its name alone."""
        listed: list[Any] = []
        for name, server in (await self._servers(self._visible(caller))).items():
            if isinstance(server, ChildServer):
                listed += (of_server(server), *adapters_of(server))
            else:
                listed.append(listed_as(name))
        return listed

    async def describe(self, name: str, caller: Caller) -> Any:
        """Describe a model by any of its names."""
        return of_server(await self.use(name, caller))

    async def cards(self, caller: Caller) -> Sequence[Card]:
        """Describe the files of the models."""
        return [
            card_of(server)
            if isinstance(server, ChildServer)
            else Card(name=name, size=0, modified=0)
            for name, server in (await self._servers(self._visible(caller))).items()
        ]

    async def details(self, name: str, caller: Caller) -> Details:
        """Describe a model by all that is known of it."""
        return details_of(await self.use(name, caller))

    async def in_memory(self, caller: Caller) -> Sequence[Loaded]:
        """Describe the models that are in memory."""
        found = []
        for server in (await self._servers(self._visible(caller))).values():
            if isinstance(server, ChildServer) and not server.sleeping:
                left = await server.idle_seconds()
                expires = time.time() + left if math.isfinite(left) else None
                found.append(
                    Loaded(card=card_of(server), n_ctx=server.model.n_ctx_seq, expires=expires)
                )
        return found

    async def properties(self, query: Mapping[str, str], caller: Caller) -> Reply:
        """Describe the model, or several as a router does."""
        name, n_models = query.get("model"), len(self._replicas.targets)
        if name or n_models == 1:
            return json_reply(properties_of(await self.use(name, caller)))
        return json_reply(properties_of_many(self.config, max_models=n_models, autoload=False))

    async def metrics(self, query: Mapping[str, str], caller: Caller) -> Reply:
        """Write the metrics of all replicas of one model, or of all, each with its labels."""
        texts = []
        for model, found in (await self._measured(query, caller, as_json=False)).items():
            for name, text in found.items():
                texts.append((f"{label('model_name', model)},{label(_REPLICA, name)}", text))
        if not query.get("model"):
            own = (await metrics.render(self, caller)).decode()
            texts.append((label("ingress", self._replicas.ingress), own))
        return Data(body=merged(texts).encode(), content_type=metrics.CONTENT_TYPE)

    async def snapshot(self, query: Mapping[str, str], caller: Caller) -> Reply:
        """Gather the snapshots of all replicas of one model, or of all."""
        measured = await self._measured(query, caller, as_json=True)
        models = {
            model: {name: json.loads(text) for name, text in found.items()}
            for model, found in measured.items()
        }
        return json_reply({"object": "metrics", "models": models})

    async def _measured(
        self, query: Mapping[str, str], caller: Caller, *, as_json: bool
    ) -> dict[str, dict[str, str]]:
        """The metrics of the replicas by their names, by model."""
        metrics.check(self.config)
        named = query.get("model")
        targets = [self._find(named, caller)] if named else [*self._visible(caller)]
        measured = {}
        for target in targets:

            async def text(hint: RoutingHint, target: ModelTarget = target) -> str:
                async with self._replicas.lease(target, hint, _PATIENCE) as line:
                    return await ask(line, ModelServer.written_metrics, as_json=as_json)

            measured[target.name] = await self._broadcast(target, "/metrics", text)
        return measured

    async def load(self, name: str, caller: Caller, *, args: tuple[str, ...] = ()) -> None:
        """Load a model in a replica, if it sleeps."""
        if args:
            _refuse()
        await caller.keep_awake(await self.use(name, caller), caller.context())

    async def unload(self, name: str, caller: Caller) -> None:
        """Put the model of a replica to sleep once no request runs."""
        await (await self.use(name, caller)).sleep()

    async def download(self, name: str, caller: Caller, *, again: bool = False) -> str:
        """Refuse to download a model."""
        _refuse()

    @property
    def prospects(self) -> Prospects:
        """Refuse: models are chosen when the application is made."""
        _refuse()

    async def remove(self, name: str, caller: Caller) -> None:
        """Refuse to delete a model."""
        _refuse()

    def news(self) -> AbstractContextManager[Feed[FleetEvent]]:
        """Refuse to follow the models."""
        _refuse()

    # -- life

    async def _serve(self, task_status: trio.TaskStatus[None]) -> None:
        async with (
            self._storing() as store,
            open_registry(self.config) as tools,
            alongside(self._own_memory.keep_trim, self._replicas.run),
            self._outliving(store, self.config),
        ):
            await tools.listed()
            self._tools = tools
            self._began(task_status, tools)
            await trio.sleep_forever()

    async def drain(self) -> None:
        """Take nothing new. Serve has waited for the requests that run."""
        self.gate.refuse()


def _refuse() -> NoReturn:
    raise NotSupportedError(
        "The models of a Ray Serve application are those that it was built with."
    )
