"""Ollama's routes about models, in a router. What generates is forwarded."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import attrs
import trio

from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Data, Pieces, Reply, json as json_reply
from trioserve.api.base.routes import Query, Routes, manages
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
from trioserve.api.router.forwarding import question
from trioserve.api.router.service import RouterService
from trioserve.chat.template.builtin import CHATML, source_of
from trioserve.chat.template.render import ChatTemplate
from trioserve.concurrency import Feed
from trioserve.config import Config
from trioserve.config.parse import parse
from trioserve.errors import HubError, NotFoundError, TemplateError
from trioserve.models import gguf, resolve_projector
from trioserve.models.catalog import GgufSummary, ModelEntry, modalities_in
from trioserve.router.forward import Outgoing, ask
from trioserve.router.states import FleetEvent, Status
from trioserve.types import GenerationParams

routes = Routes()

#: Seconds in which the process of a model says what it has in memory.
_PATIENCE = 1.0


@routes.get("/api/version")
@gives(describe.OllamaVersion)
async def version(query: Query, caller: Caller, router: RouterService) -> Reply:
    """Report the version of Ollama's API, and the version of trioserve."""
    return json_reply(describe.OllamaVersion())


@routes.get("/api/tags")
@gives(describe.OllamaModels)
async def tags(query: Query, caller: Caller, router: RouterService) -> Reply:
    """List the models."""
    entries = router.fleet.catalog.entries.values()
    visible = [
        entry
        for entry in entries
        if entry.path is not None
        and not entry.hidden
        and caller.may_use(entry.name, *entry.aliases)
    ]
    return json_reply(
        describe.describe_tags([await _described(router, entry) for entry in visible])
    )


@routes.get("/api/ps")
@gives(describe.OllamaProcesses)
async def processes(query: Query, caller: Caller, router: RouterService) -> Reply:
    """List the models that are in memory, as the process of each tells it."""
    fleet = router.fleet
    states = [fleet.state(name) for name in fleet.catalog.entries]
    loaded = [each.socket_path for each in states if each.value is Status.LOADED]
    asked = attrs.evolve(question("/api/ps", caller), method="GET")
    models = [one for path in loaded if path is not None for one in await _models_at(path, asked)]
    return json_reply({"models": models})


async def _models_at(path: Path, asked: Outgoing) -> list[dict[str, Any]]:
    """Ask the process at a socket for its model: none, if it has ended or is busy with something.

    The question keeps it neither awake nor in its place.
    """
    body = await ask(path, asked, patience=_PATIENCE)
    models = json.loads(body).get("models", []) if body else []
    assert isinstance(models, list)
    return models


@routes.post("/api/show")
@takes(OllamaShowRequest)
@gives(describe.OllamaModel)
async def show(request: OllamaShowRequest, caller: Caller, router: RouterService) -> Reply:
    """Describe a model by its file, without loading it."""
    entry = router.find(request.model, caller)
    summary = await router.summary_of(entry)
    if summary is None:
        raise NotFoundError(f"The model {entry.name!r} is not here yet, or is broken.")
    described = await _described(router, entry)
    return json_reply(await trio.to_thread.run_sync(_shown, entry, summary, described))


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


@routes.post("/api/pull")
@manages
@takes(OllamaPullRequest, streams=CONTENT_TYPE)
@gives(describe.OllamaStatus)
async def pull(request: OllamaPullRequest, caller: Caller, router: RouterService) -> Reply:
    """Download a model from the hub, and report the progress."""
    events = caller.enter(router.fleet.subscribe())
    name = await router.downloads.start(request.model, again=True)
    lines = _pulling(name, events)
    if request.stream:
        return Pieces(pieces=lines, content_type=CONTENT_TYPE)
    async with aclosing(lines):
        *_, last = [each async for each in lines]
    if (message := json.loads(last).get("error")) is not None:
        raise HubError(message)
    return Data(body=last)


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


@routes.delete("/api/delete")
@manages
@takes(OllamaDeleteRequest)
@gives(None, status=200)
async def delete(request: OllamaDeleteRequest, caller: Caller, router: RouterService) -> Reply:
    """Delete a model that was downloaded."""
    await router.downloads.remove(router.find(request.model, caller, exact=True))
    return Data()


async def _described(router: RouterService, entry: ModelEntry) -> Described:
    """Describe a model for Ollama's clients, as far as its file does."""
    modified = 0.0 if entry.version is None else entry.version[0] / 1e9
    summary = await router.summary_of(entry)
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
