"""LoRA adapters: which are loaded, and the scales of requests that name none."""

from __future__ import annotations

from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base import readers
from trioserve.api.base.body import read_json
from trioserve.api.base.fields import named
from trioserve.api.base.openapi import takes
from trioserve.api.base.request import json_response
from trioserve.api.base.service import awake_server
from trioserve.errors import InvalidRequestError

blueprint = Blueprint("lora", __name__)


@blueprint.get("/lora-adapters")
async def list_adapters() -> Response:
    """List the adapters that were loaded with the model, each with its scale."""
    adapters = (await awake_server()).parts.adapters
    return json_response(
        [
            {
                "id": id_,
                "path": info.path,
                "scale": scale,
                "task_name": info.task_name,
                "prompt_prefix": info.prompt_prefix,
            }
            for id_, (info, scale) in enumerate(zip(adapters.infos, adapters.scales, strict=True))
        ]
    )


@blueprint.post("/lora-adapters")
@takes(None)
async def set_scales() -> Response:
    """Set the scales, by a list of objects with ``id`` and ``scale``; others get 0.

    Requests that run or wait already keep theirs.
    """
    body = await read_json()
    if not isinstance(body, list):
        raise InvalidRequestError("Request body must be an array")
    scales = named(readers.lora, body, "lora")
    (await awake_server()).parts.adapters.set(dict(scales))
    return json_response({"success": True})
