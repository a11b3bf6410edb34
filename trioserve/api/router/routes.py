"""A router's own routes: its description, the list of models, and commands to models."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

import attrs
from msgspec import UNSET, UnsetType

from trioserve.api import metrics as base_metrics
from trioserve.api.base import sse
from trioserve.api.base.answers import Answer, Health, Metrics, Properties, Success
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import NAME, MismatchError, RequestBody, field, json_type, text
from trioserve.api.base.reply import Data, KeepAlive, Pieces, Reply, json as json_reply
from trioserve.api.base.routes import Query, Routes, manages
from trioserve.api.llama.admin import Model, description
from trioserve.api.openapi import gives, takes
from trioserve.api.router import forwarding, metrics as router_metrics, proxy
from trioserve.api.router.service import RouterService
from trioserve.concurrency import Feed
from trioserve.config.keys import Key
from trioserve.errors import NotFoundError, UnknownModelError
from trioserve.models import introduction
from trioserve.models.catalog import ModelEntry, Source
from trioserve.router.states import FleetEvent, ModelState, Status
from trioserve.types import Modalities

#: The sources, in the words of llama-server where it has them.
_SOURCES: Mapping[Source, str] = {
    Source.BUNDLED: "bundled",
    Source.CACHE: "cache",
    Source.DIRECTORY: "models_dir",
    Source.PRESET: "preset",
}


class _Status(Answer):
    value: str
    args: list[str] | UnsetType = UNSET
    pid: int | UnsetType = UNSET
    last_used: float | UnsetType = UNSET
    failed: bool | UnsetType = UNSET
    exit_code: int | UnsetType = UNSET
    message: str | UnsetType = UNSET
    log: list[str] | UnsetType = UNSET
    progress: float | dict[str, Any] | UnsetType = UNSET


class ModelOfRouter(Model, kw_only=True):
    """A model, with what its process has told, and its files."""

    is_open = True
    type: Literal["model"]
    display_name: str
    created_at: str
    status: _Status
    source: str | UnsetType = UNSET
    can_remove: bool | UnsetType = UNSET
    path: str | UnsetType = UNSET
    size: int | UnsetType = UNSET


class ModelsOfRouter(Answer):
    """The models of a router, always in one page."""

    object: Literal["list"]
    data: list[ModelOfRouter]
    has_more: bool
    first_id: str | None
    last_id: str | None


class DownloadStarted(Answer):
    """A model that is coming."""

    success: bool
    model: str


def describe(entry: ModelEntry, state: ModelState, modalities: Modalities) -> dict[str, Any]:
    """Describe a model, for clients of llama-server, OpenAI and Anthropic.

    Once it has been loaded, its process has said what it is. Until then, `modalities` are known.
    """
    created = 0 if entry.version is None else entry.version[0] // 10**9
    described: dict[str, Any] = {
        **description(entry.name, created),
        "aliases": list(entry.aliases),
        "tags": list(entry.tags),
        "status": status(entry, state),
        "source": _SOURCES[entry.source],
        "can_remove": entry.source is Source.CACHE,
        "path": None if entry.path is None else str(entry.path),
        "size": entry.size,
    }
    takes = {"input_modalities": modalities.names, "output_modalities": ["text"]}
    return {"architecture": takes, **introduction(entry.path), **state.info, **described}


def describe_download(name: str, progress: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a model that is not here yet."""
    status = {"value": Status.DOWNLOADING.value, "progress": progress}
    return {**description(name), "status": status}


def status(entry: ModelEntry, state: ModelState) -> dict[str, Any]:
    """Describe the state of a model. Omits unknown values, and the failure if there is none."""
    written: dict[str, Any] = {
        "value": state.value.value,
        "args": list(state.args or entry.args),
    }
    more: dict[str, Any] = {
        "progress": state.progress,
        "pid": state.pid,
        "memory": state.memory,
        "memory_used": state.memory_used,
        "memory_gpus": list(state.memory_gpus) or None,
        "last_used": state.last_used,
    }
    if state.failed:
        more |= {
            "failed": True,
            "exit_code": state.exit_code,
            "message": state.message,
            "log": list(state.log_tail),
        }
    return written | {name: value for name, value in more.items() if value is not None}


routes = Routes()


@json_type({**NAME, "minLength": 1})
def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise MismatchError("a non-empty string")
    return text(value)


@attrs.frozen(kw_only=True)
class ModelRequest(RequestBody):
    """A request that names a model of the router."""

    model: str = field(read=_name)


# -- the router itself


@routes.get("/health")
@routes.get("/v1/health")
@routes.get("/health/ready")
@routes.get("/health/live")
@gives(Health)
async def health(query: Query, caller: Caller, router: RouterService) -> Reply:
    """Report whether the router accepts requests. The list of models has the state of each."""
    _ = router.fleet
    return json_reply(Health())


@routes.get("/props")
@takes(None, query={"model": "describe this model, in place of the router"})
@gives(Properties)
async def props(query: Query, caller: Caller, router: RouterService) -> Reply:
    """Describe the router."""
    if query.get("model"):
        return await router.forwarder.of_model("/props", query, caller)
    config = router.config
    return json_reply(
        proxy.properties(config, max_models=config.models_max, autoload=config.models_autoload)
    )


@routes.post("/props")
@manages
@takes(None)
@gives(Success)
async def set_props(query: Query, caller: Caller, router: RouterService) -> Reply:
    """Set the properties of a model."""
    return await router.forwarder.of_model("/props", query, caller)


@routes.get("/metrics")
@takes(None, query={"model": "the metrics of this model only, as it has them"})
@gives(str, "text/plain")
async def metrics(query: Query, caller: Caller, router: RouterService) -> Reply:
    """Write what the router and its models have done so far, in Prometheus's text format."""
    if query.get("model"):
        return await router.forwarder.of_model("/metrics", query, caller)
    base_metrics.check(router.config)
    own = router.metrics.render(router.fleet) + await base_metrics.render(router, caller)
    found = await router_metrics.of_models(router.fleet, forwarding.question("/metrics", caller))
    return Data(
        body=router_metrics.joined(own.decode(), found).encode(),
        content_type=base_metrics.CONTENT_TYPE,
    )


@routes.get("/v1/metrics")
@takes(None, query={"model": "the metrics of this model only"})
@gives(Metrics)
async def metrics_as_json(query: Query, caller: Caller, router: RouterService) -> Reply:
    """Tell what each model that is loaded has done so far and does now, as one JSON object."""
    if query.get("model"):
        return await router.forwarder.of_model("/v1/metrics", query, caller)
    base_metrics.check(router.config)
    question = forwarding.question("/v1/metrics", caller)
    found = await router_metrics.of_models(router.fleet, question)
    models = {name: json.loads(text) for name, text in found.items()}
    return json_reply({"object": "metrics", "models": models})


# -- the models


@routes.get("/models")
@routes.get("/v1/models")
@takes(None, query={"reload": "look for models again first"})
@gives(ModelsOfRouter)
async def models(query: Query, caller: Caller, router: RouterService) -> Reply:
    """List the models and what each of them does."""
    fleet = router.fleet
    if query.get("reload"):
        caller.check_manages("?reload=")
        await fleet.reload()
    modalities = await router.modalities_of(fleet.catalog.entries.values())
    entries = fleet.catalog.entries
    listed = [
        describe(entry, fleet.state(entry.name), modalities.get(entry.name, Modalities()))
        for entry in entries.values()
        if not entry.hidden and caller.may_use(entry.name, *entry.aliases)
    ]
    coming = router.downloads.running
    new = filter(caller.may_use, coming.keys() - entries)
    listed += [describe_download(name, coming[name].progress()) for name in new]
    return json_reply(proxy.page(listed))


@routes.post("/models")
@manages
@takes(ModelRequest)
@gives(DownloadStarted)
async def download(request: ModelRequest, caller: Caller, router: RouterService) -> Reply:
    """Begin to download a model from the hub."""
    name = await router.downloads.start(request.model)
    return json_reply(DownloadStarted(True, name))


@routes.delete("/models")
@manages
@takes(None, query={"model": "the name of the model, whole"})
@gives(Success)
async def delete(query: Query, caller: Caller, router: RouterService) -> Reply:
    """Delete a model that was downloaded."""
    await router.downloads.remove(_known(router, query.get("model", ""), caller, exact=True))
    return json_reply(Success(True))


@routes.get("/models/<path:name>")
@routes.get("/v1/models/<path:name>")
@gives(ModelOfRouter)
async def model(query: Query, caller: Caller, router: RouterService, name: str) -> Reply:
    """Describe one model."""
    entry = _known(router, name, caller)
    modalities = (await router.modalities_of([entry]))[entry.name]
    return json_reply(describe(entry, router.fleet.state(entry.name), modalities))


@routes.post("/models/load")
@manages
@takes(ModelRequest)
@gives(Success)
async def load(request: ModelRequest, caller: Caller, router: RouterService) -> Reply:
    """Begin to load a model."""
    await router.fleet.load(_known(router, request.model, caller))
    return json_reply(Success(True))


@routes.post("/models/unload")
@manages
@takes(ModelRequest)
@gives(Success)
async def unload(request: ModelRequest, caller: Caller, router: RouterService) -> Reply:
    """Begin to unload a model, or cancel its download."""
    if not router.downloads.cancel(request.model):
        await router.fleet.unload(router.find(request.model, caller, exact=True))
    return json_reply(Success(True))


@routes.get("/models/sse")
@gives(str, "text/event-stream")
async def events(query: Query, caller: Caller, router: RouterService) -> Reply:
    """Stream the events of the models from now on."""
    return Pieces(
        pieces=_write(caller.enter(router.fleet.subscribe()), caller.key),
        headers=dict(sse.HEADERS),
        content_type=sse.CONTENT_TYPE,
        keep_alive=KeepAlive.every(router.config.sse_ping_interval),
    )


async def _write(received: Feed[FleetEvent], key: Key | None) -> AsyncGenerator[bytes, None]:
    yield sse.PING  # or a client would not know that it is heard
    async for each in received:
        if key is not None and not key.may_use(each.model):
            continue
        written: dict[str, Any] = {"model": each.model, "event": each.event}
        if each.data is not None:
            written["data"] = each.data
        yield sse.event(written)


def _known(router: RouterService, name: str, caller: Caller, *, exact: bool = False) -> ModelEntry:
    """Find a model. Raises NotFoundError if no model has that name."""
    try:
        return router.find(name, caller, exact=exact)
    except UnknownModelError as error:
        raise NotFoundError(error.message, param="model") from None
