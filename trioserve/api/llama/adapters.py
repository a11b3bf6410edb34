"""LoRA adapters: llama-server's routes for their scales, and vLLM's to load and unload them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, TypeAlias

import attrs

from trioserve.api.base import limits, readers
from trioserve.api.base.answers import Answer, Success
from trioserve.api.base.body import parse_json
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import Only, RequestBody, field, named
from trioserve.api.base.models import Models
from trioserve.api.base.reply import Data, Reply, json
from trioserve.api.base.routes import Query, Routes, manages, reads
from trioserve.api.openapi import gives, takes
from trioserve.errors import InvalidRequestError

routes = Routes(of_model=True)

#: The scales of adapters, by their ids.
Scales: TypeAlias = tuple[tuple[int, float], ...]


class Adapter(Answer):
    """A LoRA adapter that is loaded, and its default scale."""

    id: int
    path: str
    scale: float
    task_name: str
    prompt_prefix: str
    name: str


@routes.get("/lora-adapters")
@gives(list[Adapter])
async def list_adapters(query: Query, caller: Caller, models: Models) -> Reply:
    """List the adapters that are loaded, each with its default scale."""
    server = await models.use(query.get("model"), caller)
    await caller.keep_awake(server)
    adapters = server.adapters.scales
    found = ((name, id_, adapters.infos[id_]) for name, id_ in adapters.ids.items())
    return json(
        [
            Adapter.like(one, id=id_, scale=adapters.scales[id_], name=name)
            for name, id_, one in found
        ]
    )


def _scales(data: bytes) -> Scales:
    body = parse_json(data)
    if not isinstance(body, list):
        raise InvalidRequestError("Request body must be an array")
    return named(readers.lora, body, "lora")


@routes.post("/lora-adapters")
@manages
@takes(None)
@reads(_scales)
@gives(Success)
async def set_scales(scales: Scales, caller: Caller, models: Models) -> Reply:
    """Set the scales, by a list of objects with ``id`` and ``scale``; others get 0.

    Requests that run or wait already keep theirs.
    """
    server = await models.use(None, caller)
    await caller.keep_awake(server)
    await server.set_scales(dict(scales))
    return json(Success(True))


@attrs.frozen(kw_only=True)
class LoadAdapterRequest(RequestBody):
    """``POST /v1/load_lora_adapter``."""

    unsupported: ClassVar[Mapping[str, Only]] = {"load_inplace": Only(False)}
    lora_name: str = field(read=readers.name)
    lora_path: str = field(read=readers.text_of(limits.MAX_PATH))


@attrs.frozen(kw_only=True)
class UnloadAdapterRequest(RequestBody):
    """``POST /v1/unload_lora_adapter``."""

    unsupported: ClassVar[Mapping[str, Only]] = {
        "lora_int_id": Only(harmless="adapters have names"),
    }
    lora_name: str = field(read=readers.name)


@routes.post("/v1/load_lora_adapter")
@manages
@takes(LoadAdapterRequest)
@gives(str, "text/plain")
async def load_adapter(request: LoadAdapterRequest, caller: Caller, models: Models) -> Reply:
    """Load an adapter from the folder of ``--lora-dir``, while requests run."""
    name, path = request.lora_name, request.lora_path
    server = await models.use(None, caller)
    await server.load_adapter(name, path, await caller.counted(server))
    return _done(f"Success: LoRA adapter '{name}' added successfully.")


@routes.post("/v1/unload_lora_adapter")
@manages
@takes(UnloadAdapterRequest)
@gives(str, "text/plain")
async def unload_adapter(request: UnloadAdapterRequest, caller: Caller, models: Models) -> Reply:
    """Free an adapter that was loaded while the server ran, unless a request uses it."""
    name, server = request.lora_name, await models.use(None, caller)
    await server.unload_adapter(name, await caller.counted(server))
    return _done(f"Success: LoRA adapter '{name}' removed successfully.")


def _done(message: str) -> Data:
    return Data(body=message.encode(), content_type="text/plain; charset=utf-8")
