"""Ollama's routes about models, in a router. What generates is forwarded."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import attrs
import trio
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.body import read_body_as
from trioserve.api.base.connection import current_request
from trioserve.api.base.http import json_response
from trioserve.api.base.rights import manages, may_use
from trioserve.api.ollama import models as describe
from trioserve.api.ollama.events import CONTENT_TYPE, line
from trioserve.api.ollama.models import (
    Described,
    OllamaDeleteRequest,
    OllamaPullRequest,
    OllamaShowRequest,
    parameters_of,
)
from trioserve.api.openapi import gives, takes
from trioserve.api.router.forwarding import outgoing
from trioserve.api.router.service import current_fleet, current_router, find_model
from trioserve.chat.template.builtin import CHATML, source_of
from trioserve.chat.template.render import ChatTemplate
from trioserve.concurrency import Feed
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import HubError, NotFoundError, TemplateError
from trioserve.models import gguf, resolve_projector
from trioserve.models.catalog import GgufSummary, ModelEntry, modalities_in
from trioserve.router.forward import ask
from trioserve.router.states import FleetEvent, Status
from trioserve.types import GenerationParams

blueprint = Blueprint("router_ollama", __name__)

#: Seconds in which the process of a model says what it has in memory.
_PATIENCE = 1.0


@blueprint.get("/api/version")
@gives(describe.OllamaVersion)
async def version() -> Response:
    """Report the version of Ollama's API, and the version of trioserve."""
    return json_response(describe.OllamaVersion())


@blueprint.get("/api/tags")
@gives(describe.OllamaModels)
async def tags() -> Response:
    """List the models."""
    entries = current_fleet().catalog.entries.values()
    visible = [
        entry
        for entry in entries
        if entry.path is not None and not entry.hidden and may_use(entry.name, *entry.aliases)
    ]
    return json_response(describe.describe_tags([await _described(entry) for entry in visible]))


@blueprint.get("/api/ps")
@gives(describe.OllamaProcesses)
async def processes() -> Response:
    """List the models that are in memory, as the process of each tells it."""
    fleet = current_fleet()
    states = [fleet.state(name) for name in fleet.catalog.entries]
    loaded = [each.socket_path for each in states if each.value is Status.LOADED]
    models = [one for path in loaded if path is not None for one in await _models_at(path)]
    return json_response({"models": models})


async def _models_at(path: Path) -> list[dict[str, Any]]:
    """Ask the process at a socket for its model: none, if it has ended or is busy with something.

    The question keeps it neither awake nor in its place.
    """
    question = attrs.evolve(outgoing(current_request(), b""), method="GET")
    body = await ask(path, question, patience=_PATIENCE)
    models = json.loads(body).get("models", []) if body else []
    assert isinstance(models, list)
    return models


@blueprint.post("/api/show")
@takes(OllamaShowRequest)
@gives(describe.OllamaModel)
async def show() -> Response:
    """Describe a model by its file, without loading it."""
    name = (await read_body_as(OllamaShowRequest.parse)).model
    entry = find_model(name)
    summary = await current_router().summary_of(entry)
    if summary is None:
        raise NotFoundError(f"The model {entry.name!r} is not here yet, or is broken.")
    described = await _described(entry)
    return json_response(await trio.to_thread.run_sync(_shown, entry, summary, described))


def _shown(entry: ModelEntry, summary: GgufSummary, described: Described) -> describe.OllamaModel:
    config = parse(entry.args, {}).config
    defaults = GenerationParams(
        sampling=config.sampling, max_tokens=config.n_predict, stop=config.stop
    )
    template = config.chat_template or summary.template or CHATML
    return describe.describe_model(
        described,
        path=str(summary.path),
        template=template,
        metadata=_metadata(summary.path),
        parameters=parameters_of(defaults, config.ctx_size),
        capabilities=_capabilities(config, template),
    )


def _metadata(path: Path) -> dict[str, Any]:
    """Read texts and numbers from the header of a file; lists are left out."""
    with gguf.read(path) as header:
        texts = {key: text for key in header if (text := header.text(key))}
        numbers = {key: header.numbers(key) for key in header if not header.count(key)}
    return texts | {key: values[0] for key, values in numbers.items() if values}


def _capabilities(config: Config, template: str) -> list[str]:
    if config.serves_embeddings:
        return ["embedding"] if config.embeddings and not config.reranking else []
    try:
        # Whether it fills gaps is in its vocabulary, which is not looked at.
        return describe.capabilities(
            ChatTemplate(source_of(template)),
            fills_gaps=False,
            modalities=modalities_in(resolve_projector(config)),
        )
    except TemplateError:
        return ["completion"]


@blueprint.post("/api/pull")
@manages
@takes(OllamaPullRequest, streams=CONTENT_TYPE)
@gives(describe.OllamaStatus)
async def pull() -> Response:
    """Download a model from the hub, and report the progress."""
    request = await read_body_as(OllamaPullRequest.parse)
    router = current_router()
    events = current_request().resources.enter_context(router.fleet.subscribe())
    name = await router.downloads.start(request.model, again=True)
    lines = _pulling(name, events)
    if request.stream:
        return Response(lines, content_type=CONTENT_TYPE)
    async with aclosing(lines):
        *_, last = [each async for each in lines]
    if (message := json.loads(last).get("error")) is not None:
        raise HubError(message)
    return Response(last, content_type="application/json")


async def _pulling(name: str, events: Feed[FleetEvent]) -> AsyncGenerator[bytes, None]:
    """Report a download as Ollama does."""
    yield line({"status": "pulling manifest"})
    async for each in events:
        if each.model != name:
            continue
        if each.event == "download_progress":
            for url, file in (each.data or {}).items():
                total = {"total": file["total"], "completed": file["done"]}
                yield line({"status": f"pulling {url.rpartition('/')[2]}", "digest": url, **total})
        elif each.event == "download_finished":
            yield line({"status": "success"})
            return
        elif each.event == "download_failed":
            yield line({"error": (each.data or {}).get("message", "The download failed.")})
            return


@blueprint.delete("/api/delete")
@manages
@takes(OllamaDeleteRequest)
@gives(None, status=200)
async def delete() -> Response:
    """Delete a model that was downloaded."""
    request = await read_body_as(OllamaDeleteRequest.parse)
    await current_router().downloads.remove(find_model(request.model, exact=True))
    return Response()


async def _described(entry: ModelEntry) -> Described:
    """Describe a model for Ollama's clients, as far as its file does."""
    modified = 0.0 if entry.version is None else entry.version[0] / 1e9
    summary = await current_router().summary_of(entry)
    if summary is None:
        return Described(name=entry.name, size=entry.size, modified=modified)
    return Described(
        name=entry.name,
        size=entry.size,
        modified=modified,
        architecture=summary.architecture,
        n_params=summary.n_params,
        quantization=summary.quantization,
    )
