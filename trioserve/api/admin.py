"""Routes about the server: health, models, properties, slots."""

from __future__ import annotations

from typing import Any

from quart import Blueprint, request
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api import payload, queue
from trioserve.api.http import json_response
from trioserve.api.service import current_server, current_service
from trioserve.errors import NotSupportedError, ServerClosingError, UnavailableError
from trioserve.server import Server
from trioserve.types import SlotStatus

blueprint = Blueprint("admin", __name__)

#: Seconds that one tick may take while the engine counts as live. A batch of 2,048 prompt tokens
#: takes that long where a large model runs at 7 tokens a second.
TICK_TIMEOUT = 300.0


@blueprint.get("/health")
@blueprint.get("/v1/health")
@blueprint.get("/health/ready")
async def ready() -> Response:
    """Say whether requests are taken."""
    service = current_service()
    server = service.server  # raises while there is none
    if not service.ready or server.draining:
        raise ServerClosingError
    return json_response({"status": "ok"})


@blueprint.get("/health/live")
async def live() -> Response:
    """Say whether the engine ticks while there is work. A model that loads is alive."""
    service = current_service()
    if service.ready:
        await service.server.check_live(TICK_TIMEOUT)
    return json_response({"status": "ok"})


@blueprint.get("/models")
@blueprint.get("/v1/models")
async def models() -> Response:
    """List the one model: in OpenAI's form, and in Ollama's, as llama-server does."""
    server = current_server()
    info = server.info
    return json_response(
        {
            "models": [_ollama_model(info.name)],
            "object": "list",
            "data": [
                {
                    "id": info.name,
                    "aliases": [info.name],
                    "tags": [],
                    "object": "model",
                    "created": info.modified,
                    "owned_by": "trioserve",
                    "meta": _meta(server),
                }
            ],
        }
    )


def _ollama_model(name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion"],
        "parameters": "",
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": "",
            "families": [""],
            "parameter_size": "",
            "quantization_level": "",
        },
    }


def _meta(server: Server) -> dict[str, Any]:
    info = server.info
    return {
        "vocab_type": info.vocab_type,
        "n_vocab": info.n_vocab,
        "n_ctx": server.n_ctx_seq,
        "n_ctx_train": info.n_ctx_train,
        "n_embd": info.n_embd,
        "n_params": info.n_params,
        "size": info.size,
        "ftype": info.ftype,
    }


@blueprint.get("/props")
async def props() -> Response:
    """Describe the model, and the defaults of requests."""
    server = current_server()
    info = server.info
    return json_response(
        {
            "default_generation_settings": {
                "params": payload.generation_settings(server.options({})),
                "n_ctx": server.n_ctx_seq,
            },
            "total_slots": server.n_slots,
            "model_alias": info.name,
            "model_ftype": info.ftype,
            "model_path": info.path,
            "modalities": {"vision": False, "video": False, "audio": False},
            "endpoint_slots": server.config.slots_endpoint,
            "endpoint_props": False,
            "endpoint_metrics": False,
            "ui": True,
            "ui_settings": {},
            "chat_template": server.template.source,
            "chat_template_caps": server.template.capabilities.as_flags(),
            "bos_token": info.bos_token,
            "eos_token": info.eos_token,
            "build_info": payload.FINGERPRINT,
            "is_sleeping": False,
            "cors_proxy_enabled": False,
        }
    )


@blueprint.post("/props")
async def set_props() -> Response:
    """Refuse, as llama-server does unless it was told otherwise."""
    raise NotSupportedError("This server does not support changing global properties.")


@blueprint.get("/slots")
async def slots() -> Response:
    """Tell what each slot does. ``?fail_on_no_slot=1``: 503 when none is idle.

    ``?queue=1``: an object with these slots, and with the requests that wait for one.
    """
    server = current_server()
    if not server.config.slots_endpoint:
        raise NotSupportedError("This server does not show its slots: it runs with --no-slots.")
    status = await server.status()
    if request.args.get("fail_on_no_slot") and all(s.task_id is not None for s in status.slots):
        raise UnavailableError("no slot available")
    written = [_slot(slot) for slot in status.slots]
    if not request.args.get("queue"):
        return json_response(written)
    return json_response({"slots": written, "queue": [queue.place(one) for one in status.waiting]})


def _slot(slot: SlotStatus) -> dict[str, Any]:
    written: dict[str, Any] = {
        "id": slot.id,
        "n_ctx": slot.n_ctx,
        "speculative": False,
        "is_processing": slot.task_id is not None,
        "state": slot.state,
        "paused": slot.paused,
    }
    if slot.task_id is None or slot.task is None:
        return written
    limit = slot.task.options.max_tokens
    written |= {
        "id_task": slot.task_id,
        "n_prompt_tokens": slot.n_prompt,
        "n_prompt_tokens_processed": max(min(slot.n_past, slot.n_prompt) - slot.n_cached, 0),
        "n_prompt_tokens_cache": slot.n_cached,
        "params": payload.generation_settings(slot.task.options),
        "next_token": [
            {
                "has_next_token": True,
                "n_remain": -1 if limit < 0 else limit - slot.n_decoded,
                "n_decoded": slot.n_decoded,
            }
        ],
    }
    return written
