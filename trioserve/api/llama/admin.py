"""Routes about the server and its models: health, lists, properties, metrics, commands."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import TYPE_CHECKING, Any

import attrs
import msgspec

from trioserve.api.base import sse
from trioserve.api.base.answers import Answer, Health, Metrics, Properties, Success
from trioserve.api.base.caller import Caller
from trioserve.api.base.described import Model, ModelList, page
from trioserve.api.base.fields import (
    NAME,
    MismatchError,
    RequestBody,
    field,
    integer_in,
    json_type,
    one_of,
    text,
)
from trioserve.api.base.models import Models
from trioserve.api.base.reply import KeepAlive, Pieces, Reply, json
from trioserve.api.base.routes import Query, Routes, manages, quiet
from trioserve.api.openapi import gives, takes
from trioserve.concurrency import Feed
from trioserve.config.keys import Key
from trioserve.errors import NotSupportedError

if TYPE_CHECKING:
    from trioserve.router.states import FleetEvent

#: Characters of a search that the hub is sent.
_MAX_WORDS = 200

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


#: Data types of the cache that can be chosen; see `--cache-type-k`.
_cache_type = one_of("f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1")


@attrs.frozen(kw_only=True)
class LoadRequest(ModelRequest):
    """A request to load a model, perhaps with other settings than it has."""

    ctx_size: int | None = field(read=integer_in(0), default=None)
    parallel: int | None = field(read=integer_in(1, 256), default=None)
    n_gpu_layers: int | None = field(read=integer_in(0, 10_000), default=None)
    cache_type_k: str | None = field(read=_cache_type, default=None)
    cache_type_v: str | None = field(read=_cache_type, default=None)

    @property
    def args(self) -> tuple[str, ...]:
        """The settings as flags."""
        fields = attrs.asdict(self, filter=lambda one, value: value is not None)
        del fields["model"]
        return tuple(
            word
            for name, value in fields.items()
            for word in (f"--{name.replace('_', '-')}", str(value))
        )


class Estimate(Answer):
    """Bytes of memory that a model would need, and of RAM that are free; null: not known."""

    memory: int
    free: int | None


class Offered(Answer):
    """Entries of the hub, and the bytes of RAM that are free for models; null: not known."""

    data: list[dict[str, Any]]
    free: int | None


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


@routes.get("/models/hub")
@manages
@takes(None, query={"q": "words to look for", "repo": "list the models of this repository"})
@gives(Offered)
async def find(query: Query, caller: Caller, models: Models) -> Reply:
    """Look for models on the hub: for repositories, or for the models of one with their sizes."""
    if repo := query.get("repo"):
        found: Sequence[msgspec.Struct] = await models.prospects.offers(repo)
    else:
        found = await models.prospects.search(query.get("q", "")[:_MAX_WORDS])
    free = await models.prospects.room()
    return json(Offered([msgspec.to_builtins(one) for one in found], free))


@routes.post("/models/estimate")
@manages
@takes(LoadRequest)
@gives(Estimate)
async def estimate(request: LoadRequest, caller: Caller, models: Models) -> Reply:
    """Estimate the memory that a model would need with these settings, also one on the hub."""
    caller.check_model(request.model)
    found = await models.prospects.needs(request.model, request.args)
    return json(Estimate(found.memory, found.free))


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
@takes(LoadRequest)
@gives(Success)
async def load(request: LoadRequest, caller: Caller, models: Models) -> Reply:
    """Load a model.

    Of many models, this only begins it: follow ``/models/sse``. Settings stay until the server
    ends, or until others are sent.
    """
    await models.load(request.model, caller, args=request.args)
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
