"""LoRA adapters: llama-server's routes for their scales, and vLLM's to load and unload them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import attrs
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import limits, readers
from trioserve.api.base.answers import Answer, Success
from trioserve.api.base.body import read_body_as, read_json
from trioserve.api.base.fields import Only, RequestBody, field, named
from trioserve.api.base.http import current_context, json_response
from trioserve.api.base.rights import manages
from trioserve.api.base.service import awake_server, current_server
from trioserve.api.openapi import gives, takes
from trioserve.errors import InvalidRequestError

blueprint = Blueprint("adapters", __name__)


class Adapter(Answer):
    """A LoRA adapter that is loaded, and its default scale."""

    id: int
    path: str
    scale: float
    task_name: str
    prompt_prefix: str
    name: str


@blueprint.get("/lora-adapters")
@gives(list[Adapter])
async def list_adapters() -> Response:
    """List the adapters that are loaded, each with its default scale."""
    adapters = (await awake_server()).adapters.scales
    found = ((name, id_, adapters.infos[id_]) for name, id_ in adapters.ids.items())
    return json_response(
        [
            Adapter(id_, one.path, adapters.scales[id_], one.task_name, one.prompt_prefix, name)
            for name, id_, one in found
        ]
    )


@blueprint.post("/lora-adapters")
@manages
@takes(None)
@gives(Success)
async def set_scales() -> Response:
    """Set the scales, by a list of objects with ``id`` and ``scale``; others get 0.

    Requests that run or wait already keep theirs.
    """
    body = await read_json()
    if not isinstance(body, list):
        raise InvalidRequestError("Request body must be an array")
    scales = named(readers.lora, body, "lora")
    (await awake_server()).adapters.scales.set(dict(scales))
    return json_response({"success": True})


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


@blueprint.post("/v1/load_lora_adapter")
@manages
@takes(LoadAdapterRequest)
@gives(str, "text/plain")
async def load_adapter() -> Response:
    """Load an adapter from the folder of ``--lora-dir``, while requests run."""
    request = await read_body_as(LoadAdapterRequest.parse)
    name, path = request.lora_name, request.lora_path
    await current_server().adapters.load(name, path, context=current_context(None))
    return _done(f"Success: LoRA adapter '{name}' added successfully.")


@blueprint.post("/v1/unload_lora_adapter")
@manages
@takes(UnloadAdapterRequest)
@gives(str, "text/plain")
async def unload_adapter() -> Response:
    """Free an adapter that was loaded while the server ran, unless a request uses it."""
    name = (await read_body_as(UnloadAdapterRequest.parse)).lora_name
    await current_server().adapters.unload(name, context=current_context(None))
    return _done(f"Success: LoRA adapter '{name}' removed successfully.")


def _done(message: str) -> Response:
    return Response(message, content_type="text/plain; charset=utf-8")
