"""A router's own routes: its description, the list of models, and commands to models."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncGenerator, Mapping
from typing import Any, Literal

from msgspec import UNSET, UnsetType
from quart import Blueprint, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api import metrics as base_metrics
from trioserve.api.base import sse
from trioserve.api.base.answers import Answer, Health, Metrics, Properties, Success
from trioserve.api.base.body import read_body
from trioserve.api.base.connection import PING, KeepAlive, current_request
from trioserve.api.base.http import json_response
from trioserve.api.base.rights import check_manages, manages, may_use
from trioserve.api.llama.admin import Model
from trioserve.api.openapi import gives, takes
from trioserve.api.router import forwarding, metrics as router_metrics, proxy
from trioserve.api.router.service import RouterService, current_fleet, current_router, find_model
from trioserve.concurrency import Feed
from trioserve.config.keys import Key
from trioserve.errors import (
    InvalidRequestError,
    NotFoundError,
    UnknownModelError,
)
from trioserve.models import introduction
from trioserve.models.catalog import ModelEntry, Source
from trioserve.router.forward import Outgoing
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
        **proxy.description(entry.name, created),
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
    return {**proxy.description(name), "status": status}


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


blueprint = Blueprint("router", __name__)


# -- the router itself


@blueprint.get("/health")
@blueprint.get("/v1/health")
@blueprint.get("/health/ready")
@blueprint.get("/health/live")
@gives(Health)
async def health() -> Response:
    """Report whether the router accepts requests. The list of models has the state of each."""
    current_fleet()
    return json_response({"status": "ok"})


@blueprint.get("/props")
@takes(None, query={"model": "describe this model, in place of the router"})
@gives(Properties)
async def props() -> Response:
    """Describe the router."""
    if request.args.get("model"):
        return await forwarding.forward()
    config = current_router().config
    return json_response(
        proxy.properties(config, max_models=config.models_max, autoload=config.models_autoload)
    )


@blueprint.post("/props")
@manages
@takes(None)
@gives(Success)
async def set_props() -> Response:
    """Set the properties of a model."""
    return await forwarding.forward()


@blueprint.get("/metrics")
@takes(None, query={"model": "the metrics of this model only, as it has them"})
@gives(str, "text/plain")
async def metrics() -> Response:
    """Write what the router and its models have done so far, in Prometheus's text format."""
    if request.args.get("model"):
        return await forwarding.forward()
    router = _router_with_metrics()
    own = router.metrics.render(router.fleet) + await base_metrics.render(router)
    return Response(
        router_metrics.joined(
            own.decode(), await router_metrics.of_models(router.fleet, _question())
        ),
        content_type=base_metrics.CONTENT_TYPE,
    )


@blueprint.get("/v1/metrics")
@takes(None, query={"model": "the metrics of this model only"})
@gives(Metrics)
async def metrics_as_json() -> Response:
    """Tell what each model that is loaded has done so far and does now, as one JSON object."""
    if request.args.get("model"):
        return await forwarding.forward()
    found = await router_metrics.of_models(_router_with_metrics().fleet, _question())
    models = {name: json.loads(text) for name, text in found.items()}
    return json_response({"object": "metrics", "models": models})


def _question() -> Outgoing:
    return forwarding.outgoing(current_request(), b"")


def _router_with_metrics() -> RouterService:
    router = current_router()
    base_metrics.check(router.config)
    return router


# -- the models


@blueprint.get("/models")
@blueprint.get("/v1/models")
@takes(None, query={"reload": "look for models again first"})
@gives(ModelsOfRouter)
async def models() -> Response:
    """List the models and what each of them does."""
    fleet = current_fleet()
    if request.args.get("reload"):
        check_manages("?reload=")
        await fleet.reload()
    modalities = await current_router().modalities_of(fleet.catalog.entries.values())
    entries = fleet.catalog.entries
    listed = [
        describe(entry, fleet.state(entry.name), modalities.get(entry.name, Modalities()))
        for entry in entries.values()
        if not entry.hidden and may_use(entry.name, *entry.aliases)
    ]
    coming = current_router().downloads.running
    new = filter(may_use, coming.keys() - entries)
    listed += [describe_download(name, coming[name].progress()) for name in new]
    return json_response(proxy.page(listed))


@blueprint.post("/models")
@manages
@takes(None)
@gives(DownloadStarted)
async def download() -> Response:
    """Begin to download a model from the hub."""
    name = await current_router().downloads.start(await _name_in_body())
    return json_response({"success": True, "model": name})


@blueprint.delete("/models")
@manages
@takes(None, query={"model": "the name of the model, whole"})
@gives(Success)
async def delete() -> Response:
    """Delete a model that was downloaded."""
    router = current_router()
    await router.downloads.remove(_known(request.args.get("model", ""), exact=True))
    return json_response({"success": True})


@blueprint.get("/models/<path:name>")
@blueprint.get("/v1/models/<path:name>")
@gives(ModelOfRouter)
async def model(name: str) -> Response:
    """Describe one model."""
    fleet = current_fleet()
    entry = _known(name)
    modalities = (await current_router().modalities_of([entry]))[entry.name]
    return json_response(describe(entry, fleet.state(entry.name), modalities))


@blueprint.post("/models/load")
@manages
@takes(None)
@gives(Success)
async def load() -> Response:
    """Begin to load a model."""
    await current_fleet().load(_known(await _name_in_body()))
    return json_response({"success": True})


@blueprint.post("/models/unload")
@manages
@takes(None)
@gives(Success)
async def unload() -> Response:
    """Begin to unload a model, or cancel its download."""
    router, name = current_router(), await _name_in_body()
    if not router.downloads.cancel(name):
        await router.fleet.unload(find_model(name, exact=True))
    return json_response({"success": True})


@blueprint.get("/models/sse")
@gives(str, "text/event-stream")
async def events() -> Response:
    """Stream the events of the models from now on."""
    resources = current_request().resources
    received = resources.enter_context(current_fleet().subscribe())
    interval = current_router().config.sse_ping_interval
    current_request().keep_alive = KeepAlive(interval if interval > 0 else math.inf)
    return Response(
        _write(received, current_request().key),
        headers=sse.HEADERS,
        content_type="text/event-stream",
    )


async def _write(received: Feed[FleetEvent], key: Key | None) -> AsyncGenerator[bytes, None]:
    yield PING  # or a client would not know that it is heard
    async for each in received:
        if key is not None and not key.may_use(each.model):
            continue
        written: dict[str, Any] = {"model": each.model, "event": each.event}
        if each.data is not None:
            written["data"] = each.data
        yield sse.event(written)


async def _name_in_body() -> str:
    name = (await read_body()).get("model")
    if not isinstance(name, str) or not name:
        raise InvalidRequestError("'model' must be a non-empty string.", param="model")
    return name


def _known(name: str, *, exact: bool = False) -> ModelEntry:
    """Find a model. Raises NotFoundError if no model has that name."""
    try:
        return find_model(name, exact=exact)
    except UnknownModelError as error:
        raise NotFoundError(error.message, param="model") from None
