"""Models and servers as ``/v1/models`` and ``/props`` describe them."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

import msgspec
from msgspec import UNSET, UnsetType

from trioserve.api.base.answers import Answer, Guidance
from trioserve.api.base.output import FINGERPRINT, generation_settings
from trioserve.chat.markers import media_marker
from trioserve.config import Config
from trioserve.config.extras import has_extra
from trioserve.config.readers import parse_json
from trioserve.models import introduction
from trioserve.server.model_server import ModelServer
from trioserve.server.runs.params import that_fit


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


class _Status(Answer):
    value: str
    args: list[str] | UnsetType = UNSET
    pid: int | UnsetType = UNSET
    memory: int | UnsetType = UNSET
    memory_used: int | UnsetType = UNSET
    memory_gpus: list[int] | UnsetType = UNSET
    last_used: float | UnsetType = UNSET
    failed: bool | UnsetType = UNSET
    exit_code: int | UnsetType = UNSET
    message: str | UnsetType = UNSET
    log: list[str] | UnsetType = UNSET
    progress: float | dict[str, Any] | UnsetType = UNSET


class Model(Guidance, kw_only=True):
    """A model, or one of its LoRA adapters.

    A server of many models also gives its status and its file, and `architecture` and `meta` only
    as far as they are known without loading it.
    """

    is_open = True
    id: str
    aliases: Sequence[str] | UnsetType = UNSET
    tags: Sequence[str] | UnsetType = UNSET
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "trioserve"
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    context_length: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET
    architecture: _Architecture | UnsetType = UNSET
    meta: _Meta | UnsetType = UNSET
    root: str | UnsetType = UNSET
    parent: str | UnsetType | None = UNSET
    status: _Status | UnsetType = UNSET
    source: str | UnsetType = UNSET
    can_remove: bool | UnsetType = UNSET
    path: str | UnsetType | None = UNSET
    size: int | UnsetType = UNSET


class ModelList(Answer, kw_only=True):
    """The models, always in one page: in the form of OpenAI and Anthropic, and in Ollama's."""

    models: Sequence[dict[str, Any]]
    object: Literal["list"]
    data: Sequence[Model]
    has_more: bool
    first_id: str | None
    last_id: str | None


def names(name: str, created: int = 0) -> dict[str, Any]:
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


def page(models: Sequence[Any]) -> dict[str, Any]:
    """Make the list of some models, each a `Model` or the object of one."""
    data: list[dict[str, Any]] = msgspec.to_builtins(models)
    return {
        "models": [_as_llama_server(each) for each in data if "parent" not in each],
        "object": "list",
        "data": data,
        "has_more": False,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
    }


def _as_llama_server(model: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a model as llama-server does in the words of Ollama."""
    takes_media = len(model.get("architecture", {}).get("input_modalities", ())) > 1
    return {
        "name": model["id"],
        "model": model["id"],
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


class ModelInfo(Answer, kw_only=True):
    """A model in Anthropic's form. One that was never loaded has no bounds."""

    type: Literal["model"] = "model"
    id: str
    display_name: str
    created_at: str
    max_input_tokens: int | UnsetType = UNSET
    max_tokens: int | UnsetType = UNSET

    @classmethod
    def of(cls, model: Any) -> Self:
        """Make it of a `Model`, or the object of one."""
        told = msgspec.to_builtins(model)
        n_ctx = told.get("context_length", UNSET)
        said = {name: told[name] for name in ("id", "display_name", "created_at")}
        return cls(**said, max_input_tokens=n_ctx, max_tokens=n_ctx)


class ModelPage(Answer, kw_only=True):
    """The models in Anthropic's form, always in one page."""

    data: Sequence[ModelInfo]
    has_more: bool = False
    first_id: str | None
    last_id: str | None

    @classmethod
    def of(cls, models: Sequence[Any]) -> Self:
        """Make it of some models, each as `ModelInfo.of` takes it."""
        data = list(map(ModelInfo.of, models))
        first, last = (data[0].id, data[-1].id) if data else (None, None)
        return cls(data=data, first_id=first, last_id=last)


# -- the model of a server


def of_server(server: ModelServer) -> Model:
    """Describe the model of a server."""
    info = server.model.info
    return Model(
        **names(info.name, info.modified),
        aliases=server.config.aliases or [info.name],
        tags=server.config.tags,
        context_length=server.model.n_ctx_seq,
        max_model_len=server.model.n_ctx_seq,
        architecture=_Architecture(
            server.model.modalities.names,
            ("text",) if server.model.voices is None else ("text", "audio"),
        ),
        meta=_Meta.like(info, n_ctx=server.model.n_ctx_seq),
        **_guidance(server),
    )


def adapters_of(server: ModelServer) -> Iterable[Model]:
    """Describe the LoRA adapters that requests can name, which follow the model, as in vLLM."""
    base = server.model.info
    for name, path in server.adapters.paths.items():
        yield Model(
            **names(name, base.modified),
            context_length=server.model.n_ctx_seq,
            max_model_len=server.model.n_ctx_seq,
            root=path,
            parent=base.name,
        )


def _guidance(server: ModelServer) -> dict[str, Any]:
    return {
        **introduction(Path(server.model.info.path)),
        "has_chat_template": server.model.has_chat_template,
        "context_advice": server.model.context_advice,
        "suggested_tools": [
            tool.info.name for tool in that_fit(server.tools.tools.values(), server.model.n_ctx_seq)
        ],
    }


# -- properties


def _common(config: Config) -> dict[str, Any]:
    """The properties of every server."""
    return {
        "ui_settings": parse_json(config.ui_config or "{}", "ui_config"),
        "build_info": FINGERPRINT,
        "takes_pdf": has_extra("pdf"),
        "searches_web": config.web_search is not None,
        "endpoint_tools": config.has_tools,
        "cors_proxy_enabled": config.has_mcp_proxy,
        "priority_order": config.priority_order,
    }


def properties_of(server: ModelServer) -> dict[str, Any]:
    """Describe a server, its model, and the defaults of requests."""
    model, config = server.model, server.config
    info, modalities = model.info, model.modalities
    params = generation_settings(model.defaults, draft_types=config.draft_types)
    return {
        "default_generation_settings": {"params": params, "n_ctx": model.n_ctx_seq},
        "total_slots": model.n_slots,
        "model_alias": info.name,
        "model_ftype": info.ftype,
        "model_path": info.path,
        "modalities": {
            "vision": modalities.vision,
            "video": modalities.video,
            "audio": modalities.audio,
        },
        "media_marker": media_marker(),
        "endpoint_chat": not config.serves_embeddings,
        "endpoint_embeddings": not config.reranking
        and (config.embeddings or config.embd_ctx_size > 0),
        "endpoint_speech": model.voices is not None,
        "endpoint_slots": config.slots_endpoint,
        "endpoint_props": config.props_endpoint,
        "endpoint_metrics": config.metrics_endpoint,
        "ui": config.ui,
        "chat_template": model.template.source,
        "chat_template_caps": model.template.capabilities.as_flags(),
        "chat_template_repairs": [repair.name for repair in model.template.repairs],
        "bos_token": info.bos_token,
        "eos_token": info.eos_token,
        "is_sleeping": server.sleeping,
        **_guidance(server),
        **_common(config),
    }


def properties_of_another(
    config: Config, name: str, n_ctx: int, apis: Container[str]
) -> dict[str, Any]:
    """Describe a model of another server, as far as it is known."""
    return {
        "default_generation_settings": {"params": {}, "n_ctx": n_ctx},
        "model_alias": name,
        "model_path": "none",
        "modalities": {"vision": False, "video": False, "audio": False},
        "endpoint_chat": "chat" in apis,
        "endpoint_embeddings": "embeddings" in apis,
        "endpoint_speech": False,
        "is_sleeping": False,
        **_common(config),
        "endpoint_tools": False,
    }


def properties_of_many(config: Config, *, max_models: int, autoload: bool) -> dict[str, Any]:
    """Describe a server of many models, as llama-server's router does."""
    return {
        "role": "router",
        "max_instances": max_models,
        "models_autoload": autoload,
        # Clients of a server with one model look for these.
        "model_alias": "trioserve",
        "model_path": "none",
        "default_generation_settings": {"params": {}, "n_ctx": 0},
        "is_sleeping": False,
        **_common(config),
    }
