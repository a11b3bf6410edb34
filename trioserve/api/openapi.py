"""``GET /openapi.json``: the API as an OpenAPI description, made from the app's routes and classes.

A handler says with `takes` which class its body becomes, and with `gives` what it answers; all else
is found in the app: paths and methods in the table of routes, what a route does in its docstring,
fields in the class, errors in `trioserve.errors`. So the description has what the app has.

``GET /openapi/NAME.json`` is the part of one API, for generators of clients.
"""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET, UnsetType

from trioserve._version import __version__
from trioserve.api.base import vendors
from trioserve.api.base.answers import COMPONENTS, Answer, schema_of
from trioserve.api.base.caller import Caller
from trioserve.api.base.reply import Reply, json
from trioserve.api.base.request_schemas import classes_in, of_class, of_fields
from trioserve.api.base.routes import Query, Route, Routes, tells
from trioserve.api.edge.access import PAGE_RULES, PUBLIC, PUBLIC_RULES
from trioserve.errors import NotFoundError, TrioServeError
from trioserve.fair_limiter import text_threads

if TYPE_CHECKING:
    from trioserve.api.service import AppState

routes = Routes()

_Handler = TypeVar("_Handler", bound=Callable[..., Any])


class _Problem(Answer):
    message: str
    type: str
    code: int | str | UnsetType = UNSET
    param: str | UnsetType | None = UNSET


class CommonError(Answer):
    """The body of an error."""

    error: _Problem


_KEYS = {
    "bearer": {"type": "http", "scheme": "bearer"},
    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
}

#: Headers of requests whose answer may be a stream. See `trioserve.api.streams`.
_OF_STREAMS = {
    "X-Conversation-Id": {
        "description": "A name for the stream, which then can be resumed.",
        "schema": {"type": "string", "minLength": 1, "maxLength": 256},
    },
    "Prefer": {
        "description": "With respond-async, the answer is 202 and a location to read from.",
        "schema": {"type": "string", "examples": ["respond-async"]},
    },
}

_MEANINGS = {
    "200": "What was asked for.",
    "202": "Where the answer can be read, if the request prefers that.",
    "204": "There is nothing to say.",
}


class Later(Answer):
    """Where an answer can be read."""

    location: str


_EVENTS = {"type": "string", "description": "Events, where the body asks for a stream."}


def takes(
    request_class: type | None,
    *,
    query: Mapping[str, str] | None = None,
    streams: str = "text/event-stream",
    content: str = "application/json",
) -> Callable[[_Handler], _Handler]:
    """Tell of a handler what body it reads: an attrs class for `fields.structure`, or none.

    Args:
        request_class: the class that is made from the body.
        query: the parameters in the URL that the handler reads, with what each does.
        streams: the type of its answer where the body asks for a stream.
        content: the type of the body.
    """

    return tells(takes=request_class, query=query or {}, streams=streams, content=content)


def gives(
    type_: Any,
    content: str = "application/json",
    *,
    status: int | None = None,
    may_be_empty: bool = False,
) -> Callable[[_Handler], _Handler]:
    """Tell of a handler what it answers. `takes` tells the type of a stream.

    Args:
        type_: of the whole answer: an `Answer`, or what is made of such; none: it is empty.
        content: the type of its content.
        status: of the answer; by default 200, or 204 if it is empty.
        may_be_empty: the answer may also be a 204.
    """
    kinds = {} if type_ is None else {content: type_}
    empty: dict[str, Any] = {"204": {}} if may_be_empty else {}
    return tells(gives={str(status or (200 if kinds else 204)): kinds, **empty})


@routes.get("/openapi.json")
@gives(dict[str, Any])
async def serve(query: Query, caller: Caller, app: AppState) -> Reply:
    """Describe the routes of this server."""
    return await _described(app, None)


@routes.get("/openapi/<api>.json")
@gives(dict[str, Any])
async def serve_one(query: Query, caller: Caller, app: AppState, api: str) -> Reply:
    """Describe the routes of one API: openai, anthropic, ollama, or llama, which has the others."""
    if api not in APIS:
        raise NotFoundError(f"There is no API {api!r:.80}; there are {', '.join(APIS)}.")
    return await _described(app, api)


async def _described(app: AppState, api: str | None) -> Reply:
    if api not in app.descriptions:
        make = partial(describe, app.routes, with_keys=app.keys.needed, api=api)
        app.descriptions[api] = await text_threads().run_sync(make)
    return json(app.descriptions[api] | {"servers": [{"url": app.config.api_prefix or "/"}]})


#: The APIs that have separate documents.
APIS = ("openai", "anthropic", "ollama", "llama")

#: Paths of the page, which are in no document of an API.
_PAGE = ("/", "/licenses.txt", "/sw.js")

#: Paths that OpenAI's clients use, too, and all below those of the second group.
_OF_OPENAI = ("/v1/models", "/v1/models/{name}")
_BELOW = ("/v1/responses/", "/v1/conversations", "/v1/files", "/v1/batches")


def _is_of(api: str | None, path: str, handler: Callable[..., Any]) -> bool:
    """Whether a route is of an API; None: of any."""
    if api is None or (api == "openai" and (path in _OF_OPENAI or path.startswith(_BELOW))):
        return True
    if path == "/cors-proxy" or path in _PAGE or path.startswith(PAGE_RULES):
        return False
    return api == next((one for one in APIS if f".{one}." in handler.__module__), "llama")


def describe(
    of: Iterable[Route], *, with_keys: bool = False, api: str | None = None
) -> dict[str, Any]:
    """Describe routes, or those of one API, as an OpenAPI 3.1 document without servers."""
    paths: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    classes, answers = set(), dict[str, Any]()
    for route in sorted(of, key=lambda one: one.header):
        path = path_of(route.path)
        if not _is_of(api, path, route.handler):
            continue
        operation = _operation(path, route, answers)
        known = paths[path].setdefault(route.method.lower(), operation)
        if known is not operation:  # a header asks for the other one
            _join(known, operation, route.header)
        if route.takes is not None:
            classes |= classes_in(route.takes)
    schemas = {cls.__name__: of_class(cls) for cls in sorted(classes, key=lambda c: c.__name__)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "trioserve", "version": __version__},
        "paths": dict(sorted(paths.items())),
        "components": {
            "schemas": {
                **schemas,
                **dict(sorted(answers.items())),
                **_error_schemas(api),
            },
            "responses": _errors(),
            "securitySchemes": _KEYS,
        },
        "security": [{name: []} for name in _KEYS] if with_keys else [],
    }


def _error_schemas(api: str | None) -> dict[str, Any]:
    """The forms of errors on the routes of an API, by the names of their schemas."""
    own = {
        each.name: each.errors.form
        for each in vendors.registered
        if each.errors and each.errors.form
    }
    found: dict[str, Any] = {}
    if api is not None:
        schema_of(own.get(api, CommonError), found)
        return dict(zip(["Error"], found.values(), strict=True))
    references = [schema_of(one, found) for one in (CommonError, *own.values())]
    return {**found, "Error": {"anyOf": references}}


def path_of(rule: str) -> str:
    """Write the path of a route as OpenAPI does."""
    return re.sub(r"<(?:[^:<>]*:)?(\w+)>", r"{\1}", rule)


def _operation(path: str, route: Route, answers: dict[str, Any]) -> dict[str, Any]:
    first, _, rest = (inspect.getdoc(route.handler) or "").partition("\n\n")
    operation: dict[str, Any] = {
        "operationId": re.sub("[^a-zA-Z0-9]+", "_", f"{route.method.lower()}{path}").strip("_"),
        "summary": " ".join(first.split()),
    }
    if rest:
        operation["description"] = rest
    parameters = _parameters(path, route.query)
    given: dict[str, Any] = {
        status: {content: {"schema": schema_of(type_, answers)} for content, type_ in kinds.items()}
        for status, kinds in route.gives.items()
    }
    if route.takes is not None:
        body = {"schema": {"$ref": COMPONENTS + route.takes.__name__}}
        operation["requestBody"] = {"required": True, "content": {route.content: body}}
        if "stream" in of_fields(route.takes):
            given["200"][route.streams] = {"schema": _EVENTS}
            given["202"] = {"application/json": {"schema": schema_of(Later, answers)}}
            parameters += [
                {"name": name, "in": "header", **about} for name, about in _OF_STREAMS.items()
            ]
    if parameters:
        operation["parameters"] = parameters
    operation["responses"] = {
        **{
            status: {"description": _MEANINGS[status], **({"content": kinds} if kinds else {})}
            for status, kinds in given.items()
        },
        **{status: {"$ref": f"#/components/responses/{status}"} for status in _errors()},
    }
    if path in PUBLIC or path.startswith((PUBLIC_RULES, *PAGE_RULES)):
        operation["security"] = []
    return operation


def _join(operation: dict[str, Any], other: Mapping[str, Any], header: str) -> None:
    """Describe that a header asks for what another operation answers."""
    about = {"description": "asks for this API's form", "schema": {"type": "string"}}
    operation.setdefault("parameters", []).append({"name": header, "in": "header", **about})
    mine, theirs = (each["responses"]["200"]["content"] for each in (operation, other))
    for content, kind in theirs.items():
        mine[content] = {"schema": {"anyOf": [mine[content]["schema"], kind["schema"]]}}


def _parameters(path: str, query: Mapping[str, str]) -> list[dict[str, Any]]:
    text = {"type": "string"}
    in_path = [
        {"name": name, "in": "path", "required": True, "schema": text}
        for name in re.findall(r"\{(\w+)\}", path)
    ]
    in_query = [
        {"name": name, "in": "query", "description": about, "schema": text}
        for name, about in query.items()
    ]
    return in_path + in_query


@cache
def _errors() -> dict[str, Any]:
    """A response for each status that an error has, with what the errors mean."""
    meanings: defaultdict[str, list[str]] = defaultdict(list)
    for kind in _tree(TrioServeError):
        about = " ".join((kind.__doc__ or "").split())
        meanings[str(kind.status)].append(f"{kind.type}: {about}")
    content = {"application/json": {"schema": {"$ref": f"{COMPONENTS}Error"}}}
    return {
        status: {"description": "\n".join(dict.fromkeys(about)), "content": content}
        for status, about in sorted(meanings.items())
    }


def _tree(kind: type[TrioServeError]) -> Iterator[type[TrioServeError]]:
    yield kind
    for child in kind.__subclasses__():
        if child.__module__.startswith("trioserve."):
            yield from _tree(child)
