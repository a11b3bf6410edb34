"""The routes of Ollama's API."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quart import Blueprint

from trioserve.api.base import sse
from trioserve.api.base.fields import MismatchError
from trioserve.api.base.readers import keep_alive
from trioserve.api.base.vendors import Fields, PromptFields, StreamForm, Vendor
from trioserve.api.ollama import events, models, routes
from trioserve.api.ollama.events import PARTS, Writer


def _writer(path: str, model: str) -> Writer:
    return Writer(model=model, kind=PARTS[path])


def _unloaded(path: str, fields: Fields) -> Mapping[str, Any] | None:
    """The answer to a request that asks for nothing but the model's memory back."""
    if path not in PARTS or any(fields.get(name) for name in ("messages", "prompt", "suffix")):
        return None
    try:
        frees = keep_alive(fields.get("keep_alive")) == 0
    except MismatchError:  # or it is not there
        return None
    model = fields.get("model") or fields.get("name") or ""
    return sse.fields_of(_writer(path, model).nothing("unload")) if frees else None


def _list_of(name: str) -> Mapping[str, Any]:
    return {"models": [{"name": name, "model": name}]}


def _routes_of_router() -> tuple[Blueprint, ...]:
    from trioserve.api.ollama import router

    return (router.blueprint,)


VENDOR = Vendor(
    paths=("/api",),
    routes=(routes.blueprint,),
    routes_of_server=(models.blueprint,),
    routes_of_router=_routes_of_router,
    errors=events.SHAPE,
    streams=StreamForm(
        content_type=events.CONTENT_TYPE,
        is_asked=lambda path, fields: path in PARTS and fields.get("stream") in (None, True),
        ping=lambda path, model: _writer(path, model).empty(),
    ),
    model_fields=("model", "name"),
    prompts={
        "/api/chat": PromptFields(head=("tools",), turns=("messages",)),
        "/api/generate": PromptFields(head=("system",), turns=("prompt", "images")),
    },
    lists={"/api/tags": _list_of, "/api/ps": _list_of},
    common_paths=frozenset({"/api/version"}),
    unloaded=_unloaded,
)
