"""Ollama's routes about models, and how they describe one."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, ClassVar

import attrs
from msgspec import UNSET, UnsetType

from trioserve._version import __version__
from trioserve.api.base import readers, reply
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import Only, RequestBody, field
from trioserve.api.base.models import Card, Details, Loaded, Models
from trioserve.api.base.reply import Data, Pieces, Reply
from trioserve.api.base.routes import Query, Routes, manages
from trioserve.api.ollama.events import CONTENT_TYPE, line
from trioserve.api.openapi import gives, takes
from trioserve.concurrency import Feed
from trioserve.errors import HubError
from trioserve.types import GenerationParams

if TYPE_CHECKING:
    from trioserve.router.states import FleetEvent

# -- descriptions of models


#: The version of Ollama whose API the routes follow: the first one with the Responses API (0.13.3)
#: and Anthropic's. Clients refuse to talk to older ones.
OLLAMA_VERSION = "0.14.0"

#: When a model is unloaded that is not: clients take it for "never".
_NEVER = datetime(2318, 1, 1, tzinfo=UTC)

#: Words of llama.cpp after the name of a quantization, and the letters of others.
_SIZES = {"Small": "_S", "Medium": "_M", "Large": "_L"}
_NUMBER = re.compile(r"-?\d+")


class _OllamaDetails(Answer, kw_only=True):
    parent_model: str = ""
    format: str = "gguf"
    family: str
    families: Sequence[str]
    parameter_size: str
    quantization_level: str


class _Entry(Answer):
    """A model in a list."""

    name: str
    model: str
    size: int
    digest: str
    details: _OllamaDetails


class _OllamaTag(_Entry):
    modified_at: datetime


class OllamaModels(Answer):
    """The models of the server."""

    models: Sequence[_OllamaTag]


class _OllamaProcess(_Entry):
    expires_at: datetime
    context_length: int
    size_vram: int | UnsetType = UNSET


class OllamaProcesses(Answer):
    """The models that are in memory."""

    models: Sequence[_OllamaProcess]


class OllamaModel(Answer, kw_only=True):
    """The description of one model."""

    license: str
    modelfile: str
    parameters: str
    template: str
    details: _OllamaDetails
    model_info: Mapping[str, Any]
    capabilities: Sequence[str]
    modified_at: datetime
    context_length: int | UnsetType = UNSET
    max_model_len: int | UnsetType = UNSET


class OllamaVersion(Answer):
    """The version of Ollama's API, and that of trioserve."""

    version: str = OLLAMA_VERSION
    trioserve: str = __version__


class OllamaStatus(Answer):
    """The progress of a command."""

    status: str


def digest(card: Card) -> str:
    """A number that changes with the file. Ollama's is a hash of the content."""
    return hashlib.sha256(f"{card.name}\n{int(card.modified)}".encode()).hexdigest()


def _details(card: Card) -> _OllamaDetails:
    return _OllamaDetails(
        family=card.architecture,
        families=[card.architecture] if card.architecture else [],
        parameter_size=human_number(card.n_params),
        quantization_level=quantization_name(card.quantization),
    )


def _entry(card: Card) -> tuple[str, str, int, str, _OllamaDetails]:
    """The fields that a model has in every list."""
    return card.name, card.name, card.size, digest(card), _details(card)


def describe_tags(cards: Iterable[Card]) -> OllamaModels:
    """Answer ``GET /api/tags``: all models, newest first."""
    newest_first = sorted(cards, key=lambda one: -one.modified)
    return OllamaModels([_OllamaTag(*_entry(one), _moment(one.modified)) for one in newest_first])


def describe_processes(models: Iterable[Loaded]) -> OllamaProcesses:
    """Answer ``GET /api/ps``: the models that are in memory."""
    return OllamaProcesses(
        [_OllamaProcess(*_entry(one.card), _expiry(one.expires), one.n_ctx) for one in models]
    )


def describe_model(model: Details) -> OllamaModel:
    """Answer ``POST /api/show``."""
    metadata, parameters = model.metadata, _parameters(model.defaults, model.n_ctx)
    info = {key: _value(key, value) for key, value in metadata.items() if key not in _NOT_SHOWN}
    return OllamaModel(
        license=str(metadata.get("general.license", "")),
        modelfile=f"FROM {model.path}\n",
        parameters="\n".join(f"{name:<30} {value}" for name, value in _pairs(parameters)),
        template=model.template,
        details=_details(model.card),
        model_info=info | {"general.parameter_count": model.card.n_params},
        capabilities=model.abilities,
        modified_at=_moment(model.card.modified),
        context_length=model.n_ctx or UNSET,
        max_model_len=model.n_ctx or UNSET,
    )


_NOT_SHOWN = frozenset({"general.name", "tokenizer.chat_template"})  # as in Ollama


def _parameters(defaults: GenerationParams, n_ctx: int) -> dict[str, Any]:
    """The defaults of requests, by Ollama's names; a context of 0 is not known."""
    sampling = defaults.sampling
    return {
        **({"num_ctx": n_ctx} if n_ctx else {}),
        "num_predict": defaults.max_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "repeat_last_n": sampling.repeat_last_n,
        "repeat_penalty": sampling.repeat_penalty,
        "stop": defaults.stop,
    }


def _pairs(parameters: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in parameters.items():
        for each in value if isinstance(value, tuple) else (value,):
            yield name, f'"{each}"' if isinstance(each, str) else each


def _value(key: str, value: Any) -> Any:
    """Read a value that llama.cpp gives as text. In ``general`` all but whole numbers is text."""
    if not isinstance(value, str):
        return value
    if _NUMBER.fullmatch(value) and len(value) < 20:
        return int(value)
    if key.startswith("general."):
        return value
    if value in ("true", "false"):
        return value == "true"
    try:
        return float(value)
    except ValueError:
        return value


def human_number(n: int) -> str:
    """Write a number of parameters: 4.3B, 270M."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if n >= unit:
            return f"{n / unit:.1f}".removesuffix(".0") + letter
    return str(n)


def quantization_name(ftype: str) -> str:
    """Write a type of file as the names of models have it: Q4_K_M for "Q4_K - Medium"."""
    words = ftype.removeprefix("all ").split()
    if not words:
        return ""
    name = words[0]
    size = next((_SIZES[word] for word in words[1:] if word in _SIZES), "")
    return name if name == "Q2_K" and size == "_M" else name + size


def _expiry(seconds: float | None) -> datetime:
    """Say when a model expires. A client may have asked for more years than dates have."""
    if seconds is None or seconds >= _NEVER.timestamp():
        return _NEVER
    return _moment(seconds)


def _moment(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


# -- the routes


routes = Routes()


@attrs.frozen(kw_only=True, slots=False)
class _NamedRequest(RequestBody):
    """A request that names a model; `name` is what older clients call the field."""

    model_names = ("model", "name")
    model: str = field("model", "name", read=readers.name)


@attrs.frozen(kw_only=True, slots=False)
class OllamaShowRequest(_NamedRequest):
    """``POST /api/show``."""

    unsupported: ClassVar[Mapping[str, Only]] = {
        "options": Only({}),
        "system": Only(""),
        "template": Only(""),
        "verbose": Only(False, harmless="a description has all that there is"),
    }


@attrs.frozen(kw_only=True, slots=False)
class OllamaPullRequest(_NamedRequest):
    """``POST /api/pull``."""

    stream: bool = True
    insecure: bool = False


@attrs.frozen(kw_only=True, slots=False)
class OllamaDeleteRequest(_NamedRequest):
    """``DELETE /api/delete``."""


@routes.get("/api/version")
@gives(OllamaVersion)
async def version(query: Query, caller: Caller, models: Models) -> Reply:
    """Report the version of Ollama's API, and the version of trioserve."""
    return reply.json(OllamaVersion())


@routes.get("/api/tags")
@gives(OllamaModels)
async def tags(query: Query, caller: Caller, models: Models) -> Reply:
    """List the models."""
    return reply.json(describe_tags(await models.cards(caller)))


@routes.get("/api/ps")
@gives(OllamaProcesses)
async def processes(query: Query, caller: Caller, models: Models) -> Reply:
    """List the models that are in memory."""
    return reply.json(describe_processes(await models.in_memory(caller)))


@routes.post("/api/show")
@takes(OllamaShowRequest)
@gives(OllamaModel)
async def show(request: OllamaShowRequest, caller: Caller, models: Models) -> Reply:
    """Describe a model, by any of its names; of many models by its file, without loading it."""
    return reply.json(describe_model(await models.details(request.model, caller)))


@routes.post("/api/pull")
@manages
@takes(OllamaPullRequest, streams=CONTENT_TYPE)
@gives(OllamaStatus)
async def pull(request: OllamaPullRequest, caller: Caller, models: Models) -> Reply:
    """Download a model from the hub, and report the progress."""
    events = caller.enter(models.news())
    name = await models.download(request.model, caller, again=True)
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
async def delete(request: OllamaDeleteRequest, caller: Caller, models: Models) -> Reply:
    """Delete a model that was downloaded."""
    await models.remove(request.model, caller)
    return Data()
