"""Ollama's routes about models, in a server that has one."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any, ClassVar, Self

import attrs
import trio
from quart import Blueprint
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.body import read_body_as
from trioserve.api.base.fields import field, structure
from trioserve.api.base.neutral import Neutral, only, refuse_unsupported
from trioserve.api.base.openapi import takes
from trioserve.api.base.request import json_response
from trioserve.api.base.service import current_server
from trioserve.api.ollama import describe
from trioserve.api.ollama.lines import CONTENT_TYPE
from trioserve.errors import NotSupportedError, UnknownModelError
from trioserve.server import Server
from trioserve.server.infill import missing_tokens
from trioserve.types import GenerationParams

blueprint = Blueprint("ollama_models", __name__)


@attrs.frozen(kw_only=True, slots=False)
class _NamedRequest:
    """A request that names a model; `name` is what older clients call the field."""

    neutral: ClassVar[Mapping[str, Neutral]] = {}

    model: str = field("model", "name")

    @classmethod
    def parse(cls, body: Mapping[str, Any]) -> Self:
        """Read a body. Raises InvalidRequestError, which names the field at fault."""
        refuse_unsupported(body, cls.neutral)
        return structure(cls, body)


@attrs.frozen(kw_only=True, slots=False)
class OllamaShowRequest(_NamedRequest):
    """``POST /api/show``."""

    neutral: ClassVar[Mapping[str, Neutral]] = {
        "options": only({}),
        "system": only(""),
        "template": only(""),
        "verbose": only(False),
    }


@attrs.frozen(kw_only=True, slots=False)
class OllamaPullRequest(_NamedRequest):
    """``POST /api/pull``."""

    stream: bool = True
    insecure: bool = False


@attrs.frozen(kw_only=True, slots=False)
class OllamaDeleteRequest(_NamedRequest):
    """``DELETE /api/delete``."""


@blueprint.get("/api/version")
async def version() -> Response:
    """Tell which version of Ollama's API this is, and which version of trioserve."""
    return json_response(describe.version())


@blueprint.get("/api/tags")
async def tags() -> Response:
    """List the one model."""
    return json_response(describe.tags([described(current_server())]))


@blueprint.get("/api/ps")
async def processes() -> Response:
    """List the one model, if it is in memory."""
    server = current_server()
    if server.sleeping:
        return json_response(describe.processes([]))
    seconds = server.idle_until - trio.current_time()
    loaded = describe.Loaded(
        model=described(server),
        n_ctx=server.model.n_ctx_seq,
        expires=time.time() + seconds if math.isfinite(seconds) else None,
    )
    return json_response(describe.processes([loaded]))


@blueprint.post("/api/show")
@takes(OllamaShowRequest)
async def show() -> Response:
    """Describe the one model, by any of its names."""
    request = await read_body_as(OllamaShowRequest.parse)
    server = current_server()
    check_name(server, request.model)
    model = server.model
    return json_response(
        describe.show(
            described(server),
            path=model.info.path,
            template=model.template.source,
            metadata=model.info.metadata,
            parameters=parameters_of(model.defaults, model.n_ctx_seq),
            capabilities=_capabilities(server),
        )
    )


@blueprint.post("/api/pull")
@takes(OllamaPullRequest, streams=CONTENT_TYPE)
async def pull() -> Response:
    """Refuse to download a model: this server has one."""
    request = await read_body_as(OllamaPullRequest.parse)
    raise NotSupportedError(
        f"This server has one model, and cannot pull {request.model!r}; the command 'trioserve "
        "pull' does, and a server that is started without a model of its own has all of them."
    )


@blueprint.delete("/api/delete")
@takes(OllamaDeleteRequest)
async def delete() -> Response:
    """Refuse to delete the one model that the server runs."""
    request = await read_body_as(OllamaDeleteRequest.parse)
    check_name(current_server(), request.model)
    raise NotSupportedError(
        f"This server runs {request.model!r}, so it does not delete it; the command 'trioserve rm' "
        "removes models that were pulled."
    )


def described(server: Server) -> describe.Described:
    """What Ollama's clients are told of the model of a server."""
    info = server.model.info
    return describe.Described(
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
    names = {server.model.info.name, *server.config.aliases}
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
    return describe.capabilities(
        model.template,
        fills_gaps=not missing_tokens(model.vocab),
        modalities=model.modalities,
    )
