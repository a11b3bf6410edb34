"""Routes about the server: health, models, properties."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

from msgspec import UNSET, UnsetType

from trioserve.api import metrics as base
from trioserve.api.base.answers import Answer, Guidance, Health, Metrics, Properties, Success
from trioserve.api.base.caller import Caller
from trioserve.api.base.output import FINGERPRINT
from trioserve.api.base.reply import Data, Reply, json
from trioserve.api.base.routes import Query, Routes, lists_models, manages
from trioserve.api.base.settings import generation_settings
from trioserve.api.openapi import gives, takes
from trioserve.api.service import Service
from trioserve.chat.markers import media_marker
from trioserve.config.extras import has_extra
from trioserve.errors import NotFoundError, NotSupportedError
from trioserve.models import introduction
from trioserve.server.observers import metrics as observed
from trioserve.server.runs.params import that_fit
from trioserve.server.server import Server

routes = Routes()


@routes.get("/health")
@routes.get("/v1/health")
@routes.get("/health/ready")
@gives(Health)
async def ready(query: Query, caller: Caller, service: Service) -> Reply:
    """Say whether requests are taken."""
    service.check_ready()
    return json(Health())


@routes.get("/health/live")
@gives(Health)
async def live(query: Query, caller: Caller, service: Service) -> Reply:
    """Say whether the engine works. A model that loads is alive."""
    service.check_live()
    return json(Health())


class _Architecture(Answer):
    input_modalities: Sequence[str]
    output_modalities: Sequence[str] = ("text",)


class _Meta(Answer):
    vocab_type: int
    n_vocab: int
    n_ctx: int
    n_ctx_train: int
    n_embd: int
    n_params: int
    size: int
    ftype: str


class Model(Guidance, kw_only=True):
    """A model, or one of its LoRA adapters, which has only its names."""

    id: str
    aliases: Sequence[str] | UnsetType = UNSET
    tags: Sequence[str] | UnsetType = UNSET
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "trioserve"
    architecture: _Architecture | UnsetType = UNSET
    meta: _Meta | UnsetType = UNSET
    root: str | UnsetType = UNSET
    parent: str | UnsetType | None = UNSET


class ModelList(Answer, kw_only=True):
    """The models: in OpenAI's form, and in Ollama's."""

    models: Sequence[dict[str, Any]]
    object: Literal["list"] = "list"
    data: Sequence[Model]


def description(name: str, created: int = 0) -> dict[str, Any]:
    """Describe a model by its name alone, for the clients of all APIs."""
    at = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    return {
        "id": name,
        "object": "model",
        "owned_by": "trioserve",
        "created": created,
        # as Anthropic's clients read it
        "type": "model",
        "display_name": name,
        "created_at": at,
    }


def _list_of(name: str) -> dict[str, Any]:
    described = {**description(name), "name": name, "model": name}
    return {"data": [described], "models": [described]}


@routes.get("/models")
@routes.get("/v1/models")
@lists_models(_list_of)
@gives(ModelList)
async def models(query: Query, caller: Caller, service: Service) -> Reply:
    """List the one model: in OpenAI's form, and in Ollama's, as llama-server does.

    In OpenAI's form, its LoRA adapters follow, as in vLLM's.
    """
    server = service.server
    listed = service.may_use(caller)
    return json(
        ModelList(
            models=[_ollama_model(server)] if listed else [],
            data=[openai_model(server), *_adapters(server)] if listed else [],
        )
    )


@routes.get("/models/<path:name>")
@routes.get("/v1/models/<path:name>")
@gives(Model)
async def model(query: Query, caller: Caller, service: Service, name: str) -> Reply:
    """Describe the one model, by any of its names."""
    server = service.use(name, caller)
    for adapter in _adapters(server):
        if adapter.id == name:
            return json(adapter)
    if name not in server.model.names:
        raise NotFoundError(
            f"There is no model {name!r} here. The model is {server.model.info.name!r}.",
            param="model",
        )
    return json(openai_model(server))


def openai_model(server: Server) -> Model:
    """Describe the one model, as lists of models have it."""
    info = server.model.info
    return Model(
        id=info.name,
        aliases=server.config.aliases or [info.name],
        tags=server.config.tags,
        created=info.modified,
        architecture=_Architecture(server.model.modalities.names),
        meta=_Meta(
            info.vocab_type,
            info.n_vocab,
            server.model.n_ctx_seq,
            info.n_ctx_train,
            info.n_embd,
            info.n_params,
            info.size,
            info.ftype,
        ),
        **_guidance(server),
    )


def _adapters(server: Server) -> list[Model]:
    """Describe the LoRA adapters that requests can name."""
    base = server.model.info
    paths = server.adapters.paths.items()
    return [
        Model(id=name, created=base.modified, root=path, parent=base.name) for name, path in paths
    ]


def _guidance(server: Server) -> dict[str, Any]:
    """What a user should know before the first chat."""
    return {
        **introduction(Path(server.model.info.path)),
        "has_chat_template": server.model.has_chat_template,
        "context_advice": server.model.context_advice,
        "suggested_tools": [
            tool.info.name for tool in that_fit(server.tools.tools.values(), server.model.n_ctx_seq)
        ],
    }


def _ollama_model(server: Server) -> dict[str, Any]:
    name = server.model.info.name
    takes_media = server.model.modalities.take(None)
    return {
        "name": name,
        "model": name,
        "modified_at": "",
        "size": "",
        "digest": "",
        "type": "model",
        "description": "",
        "tags": [""],
        "capabilities": ["completion", "multimodal"] if takes_media else ["completion"],
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


@routes.get("/props")
@gives(Properties)
async def props(query: Query, caller: Caller, service: Service) -> Reply:
    """Describe the model, and the defaults of requests."""
    server = service.server
    info, modalities = server.model.info, server.model.modalities
    return json(
        {
            "default_generation_settings": {
                "params": generation_settings(
                    server.model.defaults, draft_types=server.config.draft_types
                ),
                "n_ctx": server.model.n_ctx_seq,
            },
            "total_slots": server.model.n_slots,
            "model_alias": info.name,
            "model_ftype": info.ftype,
            "model_path": info.path,
            "modalities": {
                "vision": modalities.vision,
                "video": modalities.video,
                "audio": modalities.audio,
            },
            "media_marker": media_marker(),
            "takes_pdf": has_extra("pdf"),
            "endpoint_slots": server.config.slots_endpoint,
            "endpoint_props": server.config.props_endpoint,
            "endpoint_metrics": server.config.metrics_endpoint,
            "endpoint_tools": server.config.has_tools,
            "ui": server.config.ui,
            "ui_settings": server.config.ui_settings,
            "chat_template": server.model.template.source,
            "chat_template_caps": server.model.template.capabilities.as_flags(),
            "bos_token": info.bos_token,
            "eos_token": info.eos_token,
            "build_info": FINGERPRINT,
            "is_sleeping": server.lifecycle.sleeping,
            "cors_proxy_enabled": server.config.has_mcp_proxy,
            **_guidance(server),
            "priority_order": server.config.priority_order,
        }
    )


@routes.post("/props")
@manages
@takes(None)
@gives(Success)
async def set_props(query: Query, caller: Caller, service: Service) -> Reply:
    """Say yes and change nothing, as llama-server does: there is no property to change yet."""
    if not service.server.config.props_endpoint:
        raise NotSupportedError(
            "This server does not support changing global properties. Start it with `--props`"
        )
    return json(Success(True))


@routes.get("/metrics")
@gives(str, "text/plain")
async def metrics(query: Query, caller: Caller, service: Service) -> Reply:
    """Write what the server has done so far, in Prometheus's text format."""
    server, metrics = _measured(service)
    status = await server.status()
    return Data(
        body=metrics.render(status) + await base.render(service, caller),
        headers={"Process-Start-Time-Unix": str(int(metrics.started))},
        content_type=base.CONTENT_TYPE,
    )


@routes.get("/v1/metrics")
@gives(Metrics)
async def metrics_as_json(query: Query, caller: Caller, service: Service) -> Reply:
    """Tell what the server has done so far and what it does now, as one JSON object."""
    server, metrics = _measured(service)
    return json(metrics.snapshot(await server.status()))


def _measured(service: Service) -> tuple[Server, observed.Metrics]:
    """The server and its metrics. Raises NotSupportedError where there are none."""
    server = service.server
    if server.metrics is None:
        raise NotSupportedError(
            "This server does not support metrics endpoint. Start it with `--metrics`"
        )
    return server, server.metrics
