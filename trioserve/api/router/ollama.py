"""Ollama's routes about models, in a router. What generates is forwarded."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

import trio
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.body import read_body_as
from trioserve.api.base.openapi import takes
from trioserve.api.base.request import current_request, json_response
from trioserve.api.ollama import describe
from trioserve.api.ollama.describe import Described, Loaded
from trioserve.api.ollama.errors import line
from trioserve.api.ollama.lines import CONTENT_TYPE
from trioserve.api.ollama.models import OllamaDeleteRequest, OllamaPullRequest, OllamaShowRequest
from trioserve.api.router.service import current_fleet, current_router
from trioserve.errors import NotFoundError, UnknownModelError
from trioserve.models.catalog import GgufSummary, ModelEntry
from trioserve.router.states import FleetEvent, Status

blueprint = Blueprint("router_ollama", __name__)


@blueprint.get("/api/version")
async def version() -> Response:
    """Tell which version of Ollama's API this is, and which version of trioserve."""
    return json_response(describe.version())


@blueprint.get("/api/tags")
async def tags() -> Response:
    """List the models."""
    entries = current_fleet().catalog.entries.values()
    visible = [entry for entry in entries if entry.path is not None and not entry.hidden]
    return json_response(describe.tags([await _described(entry) for entry in visible]))


@blueprint.get("/api/ps")
async def processes() -> Response:
    """List the models that are in memory."""
    fleet, loaded = current_fleet(), []
    for entry in fleet.catalog.entries.values():
        state = fleet.state(entry.name)
        if state.value is Status.LOADED:
            n_ctx = state.info.get("meta", {}).get("n_ctx", 0)
            loaded.append(Loaded(model=await _described(entry), n_ctx=n_ctx))
    return json_response(describe.processes(loaded))


@blueprint.post("/api/show")
@takes(OllamaShowRequest)
async def show() -> Response:
    """Describe a model, without loading it."""
    entry = _known((await read_body_as(OllamaShowRequest.parse)).model)
    summary = await current_router().summary_of(entry)
    if summary is None:
        raise NotFoundError(f"The model {entry.name!r} is not here yet, or is broken.")
    return json_response(
        describe.show(
            await _described(entry),
            path=str(entry.path),
            template=summary.template,
            metadata=_metadata(summary),
            parameters={},
            capabilities=["completion", *(["tools"] if "tools" in summary.template else [])],
        )
    )


@blueprint.post("/api/pull")
@takes(OllamaPullRequest, streams=CONTENT_TYPE)
async def pull() -> Response:
    """Download a model from the hub, and tell how far that is."""
    request = await read_body_as(OllamaPullRequest.parse)
    router = current_router()
    events = await current_request().resources.enter_async_context(router.fleet.subscribe())
    name = await router.downloads.start(request.model, again=True)
    lines = _pulling(name, events)
    if request.stream:
        return Response(lines, content_type=CONTENT_TYPE)
    async with aclosing(lines):
        *_, last = [each async for each in lines]
    return Response(last, content_type="application/json")


async def _pulling(
    name: str, events: trio.MemoryReceiveChannel[FleetEvent]
) -> AsyncGenerator[bytes, None]:
    """Tell of a download as Ollama does."""
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
@takes(OllamaDeleteRequest)
async def delete() -> Response:
    """Delete a model that was downloaded."""
    request = await read_body_as(OllamaDeleteRequest.parse)
    await current_router().downloads.remove(_known(request.model))
    return Response()


def _known(name: str) -> ModelEntry:
    """Find a model. Raises NotFoundError: there is none of that name."""
    try:
        return current_fleet().catalog.find(name)
    except UnknownModelError as error:
        raise NotFoundError(error.message, param="model") from None


async def _described(entry: ModelEntry) -> Described:
    """What Ollama's clients are told of a model, as far as its file says so."""
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


def _metadata(summary: GgufSummary) -> dict[str, str | int]:
    """The metadata that clients look for."""
    arch = summary.architecture
    return {
        "general.architecture": arch,
        "general.license": summary.licence,
        f"{arch}.block_count": summary.n_layer,
        f"{arch}.context_length": summary.n_ctx_train,
        f"{arch}.embedding_length": summary.n_embd,
    }
