"""Routes about the server and its models: health, lists, properties, metrics, commands."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any

import attrs

from trioserve.api.base import sse
from trioserve.api.base.answers import Answer, Health, Metrics, Properties, Success
from trioserve.api.base.caller import Caller
from trioserve.api.base.described import Model, ModelList, page
from trioserve.api.base.fields import NAME, MismatchError, RequestBody, field, json_type, text
from trioserve.api.base.models import Models
from trioserve.api.base.reply import KeepAlive, Pieces, Reply, json
from trioserve.api.base.routes import Query, Routes, manages, quiet
from trioserve.api.openapi import gives, takes
from trioserve.concurrency import Feed
from trioserve.config.keys import Key
from trioserve.errors import NotSupportedError

if TYPE_CHECKING:
    from trioserve.router.states import FleetEvent

routes = Routes()
of_model = Routes(of_model=True)


@routes.get("/health")
@routes.get("/v1/health")
@routes.get("/health/ready")
@quiet
@gives(Health)
async def ready(query: Query, caller: Caller, models: Models) -> Reply:
    """Say whether requests are taken. The list of models has the state of each."""
    models.check_ready()
    return json(Health())


@routes.get("/health/live")
@quiet
@gives(Health)
async def live(query: Query, caller: Caller, models: Models) -> Reply:
    """Say whether the engine works. A model that loads is alive."""
    models.check_live()
    return json(Health())


@routes.get("/props")
@takes(None, query={"model": "of many models, describe this one"})
@gives(Properties)
async def props(query: Query, caller: Caller, models: Models) -> Reply:
    """Describe the server, and the defaults of requests."""
    return await models.properties(query, caller)


@of_model.post("/props")
@manages
@takes(None)
@gives(Success)
async def set_props(query: Query, caller: Caller, models: Models) -> Reply:
    """Say yes and change nothing, as llama-server does: there is no property to change yet."""
    if not (await models.use(query.get("model"), caller)).config.props_endpoint:
        raise NotSupportedError(
            "This server does not support changing global properties. Start it with `--props`"
        )
    return json(Success(True))


@routes.get("/metrics")
@quiet
@takes(None, query={"model": "of many models, the metrics of this one only, as it has them"})
@gives(str, "text/plain")
async def metrics(query: Query, caller: Caller, models: Models) -> Reply:
    """Write what the server and its models have done so far, in Prometheus's text format."""
    return await models.metrics(query, caller)


@routes.get("/v1/metrics")
@quiet
@takes(None, query={"model": "of many models, the metrics of this one only"})
@gives(Metrics)
async def metrics_as_json(query: Query, caller: Caller, models: Models) -> Reply:
    """Tell what the server has done so far and what it does now, as one JSON object.

    Of many models, each that is loaded has its own.
    """
    return await models.snapshot(query, caller)


# -- the models


@json_type({**NAME, "minLength": 1})
def _name(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise MismatchError("a non-empty string")
    return text(value)


@attrs.frozen(kw_only=True)
class ModelRequest(RequestBody):
    """A request that names a model."""

    model: str = field(read=_name)


class DownloadStarted(Answer):
    """A model that is coming."""

    success: bool
    model: str


@routes.get("/models")
@routes.get("/v1/models")
@takes(None, query={"reload": "of many models, look for them again first"})
@gives(ModelList)
async def listed(query: Query, caller: Caller, models: Models) -> Reply:
    """List the models and what each of them does: in OpenAI's form, and in Ollama's.

    In OpenAI's form, LoRA adapters that requests can name follow their model, as in vLLM's. A
    request with the header ``anthropic-version`` gets Anthropic's form.
    """
    reload = bool(query.get("reload"))
    if reload:
        caller.check_manages("?reload=")
    return json(page(await models.listed(caller, reload=reload)))


@routes.get("/models/<path:name>")
@routes.get("/v1/models/<path:name>")
@gives(Model)
async def described(query: Query, caller: Caller, models: Models, name: str) -> Reply:
    """Describe one model, by any of its names."""
    return json(await models.describe(name, caller))


@routes.post("/models")
@manages
@takes(ModelRequest)
@gives(DownloadStarted)
async def download(request: ModelRequest, caller: Caller, models: Models) -> Reply:
    """Begin to download a model from the hub."""
    return json(DownloadStarted(True, await models.download(request.model, caller)))


@routes.delete("/models")
@manages
@takes(None, query={"model": "the name of the model, whole"})
@gives(Success)
async def delete(query: Query, caller: Caller, models: Models) -> Reply:
    """Delete a model that was downloaded."""
    await models.remove(query.get("model", ""), caller)
    return json(Success(True))


@routes.post("/models/load")
@manages
@takes(ModelRequest)
@gives(Success)
async def load(request: ModelRequest, caller: Caller, models: Models) -> Reply:
    """Load a model.

    Of many models, this only begins it: follow ``/models/sse``.
    """
    await models.load(request.model, caller)
    return json(Success(True))


@routes.post("/models/unload")
@manages
@takes(ModelRequest)
@gives(Success)
async def unload(request: ModelRequest, caller: Caller, models: Models) -> Reply:
    """Free the memory of a model, or cancel its download.

    A server with one model waits until no request runs; its next one loads the model again.
    """
    await models.unload(request.model, caller)
    return json(Success(True))


@routes.get("/models/sse")
@gives(str, "text/event-stream")
async def events(query: Query, caller: Caller, models: Models) -> Reply:
    """Stream the events of the models from now on."""
    return Pieces(
        pieces=_write(caller.enter(models.news()), caller.key),
        headers=dict(sse.HEADERS),
        content_type=sse.CONTENT_TYPE,
        keep_alive=KeepAlive.every(models.config.sse_ping_interval),
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
