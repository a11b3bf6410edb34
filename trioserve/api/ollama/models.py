"""Ollama's routes about models, in a server with one model; and how they describe a model."""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

import attrs
import trio
from msgspec import UNSET, UnsetType

from trioserve._version import __version__
from trioserve.api.base import readers
from trioserve.api.base.answers import Answer
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import Only, RequestBody, field
from trioserve.api.base.reply import Reply, json
from trioserve.api.base.routes import Query, Routes, lists_models, manages
from trioserve.api.ollama.events import CONTENT_TYPE
from trioserve.api.openapi import gives, takes
from trioserve.api.service import Service
from trioserve.chat.template.render import ChatTemplate
from trioserve.errors import NotSupportedError, UnknownModelError
from trioserve.server.prompts.infill import missing_tokens
from trioserve.server.server import Server
from trioserve.types import GenerationParams, Modalities

# -- descriptions of models, made from plain data: a server has one model, a router many


#: The version of Ollama whose API the routes follow: the first one with the Responses API (0.13.3)
#: and Anthropic's. Clients refuse to talk to older ones.
OLLAMA_VERSION = "0.14.0"

#: When a model is unloaded that is not: clients take it for "never".
_NEVER = datetime(2318, 1, 1, tzinfo=UTC)

#: What llama.cpp says after the name of a quantization, and what others write.
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


class OllamaVersion(Answer):
    """The version of Ollama's API, and that of trioserve."""

    version: str = OLLAMA_VERSION
    trioserve: str = __version__


class OllamaStatus(Answer):
    """How far a command has come."""

    status: str


@attrs.frozen(kw_only=True)
class Described:
    """The description of a model."""

    name: str
    size: int  # bytes
    modified: float  # seconds since the epoch
    architecture: str = ""
    n_params: int = 0
    quantization: str = ""  # as llama.cpp writes it, such as "Q4_K - Medium"

    def entry(self) -> tuple[str, str, int, str, _OllamaDetails]:
        """The fields that it has in every list."""
        return self.name, self.name, self.size, self.digest, self.details

    @property
    def digest(self) -> str:
        """A number that changes with the file. Ollama's is a hash of the content."""
        return hashlib.sha256(f"{self.name}\n{int(self.modified)}".encode()).hexdigest()

    @property
    def details(self) -> _OllamaDetails:
        """The details, in the lists and in the description of one model."""
        return _OllamaDetails(
            family=self.architecture,
            families=[self.architecture] if self.architecture else [],
            parameter_size=human_number(self.n_params),
            quantization_level=quantization_name(self.quantization),
        )


def describe_tags(models: Iterable[Described]) -> OllamaModels:
    """Answer ``GET /api/tags``: all models, newest first."""
    newest_first = sorted(models, key=lambda one: -one.modified)
    return OllamaModels([_OllamaTag(*one.entry(), _moment(one.modified)) for one in newest_first])


@attrs.frozen(kw_only=True)
class Loaded:
    """A model that is in memory, and until when: seconds since the epoch; None: for good."""

    model: Described
    n_ctx: int
    expires: float | None = None


def describe_processes(models: Iterable[Loaded]) -> OllamaProcesses:
    """Answer ``GET /api/ps``: the models that are in memory."""
    return OllamaProcesses(
        [_OllamaProcess(*one.model.entry(), _expiry(one.expires), one.n_ctx) for one in models]
    )


def describe_model(
    model: Described,
    *,
    path: str,
    template: str,
    metadata: Mapping[str, Any],
    parameters: Mapping[str, Any],
    capabilities: Sequence[str],
) -> OllamaModel:
    """Answer ``POST /api/show``.

    Args:
        model: what the lists say of it.
        path: of its first file.
        template: the chat template, in Jinja.
        metadata: of the GGUF file.
        parameters: what holds for requests that do not say.
        capabilities: such as "completion" and "tools".
    """
    info = {key: _value(key, value) for key, value in metadata.items() if key not in _NOT_SHOWN}
    return OllamaModel(
        license=str(metadata.get("general.license", "")),
        modelfile=f"FROM {path}\n",
        parameters="\n".join(f"{name:<30} {value}" for name, value in _pairs(parameters)),
        template=template,
        details=model.details,
        model_info=info | {"general.parameter_count": model.n_params},
        capabilities=capabilities,
        modified_at=_moment(model.modified),
    )


def can_think(template: ChatTemplate) -> bool:
    """Whether a model may reason before it answers, judging by its template."""
    return template.format.thinking is not None or template.capabilities.supports_enable_thinking


def capabilities(template: ChatTemplate, *, fills_gaps: bool, modalities: Modalities) -> list[str]:
    """Say what a model that makes text can do, in Ollama's words."""
    can = {
        "completion": True,
        "tools": template.capabilities.supports_tools,
        "thinking": can_think(template),
        "insert": fills_gaps,
        "vision": modalities.vision,
        "audio": modalities.audio,
    }
    return [name for name, is_so in can.items() if is_so]


_NOT_SHOWN = frozenset({"general.name", "tokenizer.chat_template"})  # as in Ollama


def _pairs(parameters: Mapping[str, Any]) -> Iterable[tuple[str, Any]]:
    for name, value in parameters.items():
        for each in value if isinstance(value, tuple) else (value,):
            yield name, f'"{each}"' if isinstance(each, str) else each


def _value(key: str, value: Any) -> Any:
    """Read a value that llama.cpp gives as text. In ``general`` only whole numbers are no text."""
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


def _list_of(name: str) -> dict[str, Any]:
    return {"models": [{"name": name, "model": name}]}


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
async def version(query: Query, caller: Caller, service: Service) -> Reply:
    """Report the version of Ollama's API, and the version of trioserve."""
    return json(OllamaVersion())


@routes.get("/api/tags")
@lists_models(_list_of)
@gives(OllamaModels)
async def tags(query: Query, caller: Caller, service: Service) -> Reply:
    """List the model of this server."""
    shown = [described(service.server)] if service.may_use(caller) else []
    return json(describe_tags(shown))


@routes.get("/api/ps")
@lists_models(_list_of)
@gives(OllamaProcesses)
async def processes(query: Query, caller: Caller, service: Service) -> Reply:
    """List the one model, if it is in memory."""
    server = service.server
    if server.lifecycle.sleeping or not service.may_use(caller):
        return json(describe_processes([]))
    seconds = server.lifecycle.idle_until - trio.current_time()
    loaded = Loaded(
        model=described(server),
        n_ctx=server.model.n_ctx_seq,
        expires=time.time() + seconds if math.isfinite(seconds) else None,
    )
    return json(describe_processes([loaded]))


@routes.post("/api/show")
@takes(OllamaShowRequest)
@gives(OllamaModel)
async def show(request: OllamaShowRequest, caller: Caller, service: Service) -> Reply:
    """Describe the one model, by any of its names."""
    server = service.use(request.model, caller)
    check_name(server, request.model)
    model = server.model
    return json(
        describe_model(
            described(server),
            path=model.info.path,
            template=model.template.source,
            metadata=model.info.metadata,
            parameters=parameters_of(model.defaults, model.n_ctx_seq),
            capabilities=_capabilities(server),
        )
    )


@routes.post("/api/pull")
@manages
@takes(OllamaPullRequest, streams=CONTENT_TYPE)
@gives(OllamaStatus)
async def pull(request: OllamaPullRequest, caller: Caller, service: Service) -> Reply:
    """Refuse to download a model: this server has one."""
    raise NotSupportedError(
        f"This server has one model, and cannot pull {request.model!r}. Run 'trioserve pull', "
        "and start the server without a model to serve all downloaded models."
    )


@routes.delete("/api/delete")
@manages
@takes(OllamaDeleteRequest)
@gives(OllamaStatus)
async def delete(request: OllamaDeleteRequest, caller: Caller, service: Service) -> Reply:
    """Refuse to delete the one model that the server runs."""
    check_name(service.server, request.model)
    raise NotSupportedError(
        f"This server runs {request.model!r}, so it does not delete it; the command 'trioserve rm' "
        "removes models that were pulled."
    )


def described(server: Server) -> Described:
    """Describe the model of a server for Ollama's clients."""
    info = server.model.info
    return Described(
        name=info.name,
        size=info.size,
        modified=info.modified,
        architecture=info.metadata.get("general.architecture", ""),
        n_params=info.n_params,
        quantization=info.ftype,
    )


def parameters_of(defaults: GenerationParams, n_ctx: int) -> dict[str, Any]:
    """What holds for requests that do not say, by Ollama's names; a context of 0 is not known."""
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


def check_name(server: Server, name: str) -> None:
    """Refuse a name that the model does not have. The tag "latest" says nothing.

    Raises:
        UnknownModelError: it is the name of another model.
    """
    names = {*server.model.names}
    if name not in names and name.removesuffix(":latest") not in names:
        raise UnknownModelError(
            f"Model {name!r} not found; the model here is {server.model.info.name!r}.",
            param="model",
        )


def _capabilities(server: Server) -> list[str]:
    """Say what the model can do, in Ollama's words."""
    if (pooling := server.model.pooling) is not None:
        return ["embedding"] if pooling != "rank" else []
    model = server.model
    return capabilities(
        model.template,
        fills_gaps=not missing_tokens(model.vocab),
        modalities=model.modalities,
    )
