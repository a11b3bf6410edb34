"""The route of Google's Vertex AI: several requests to other routes, in one.

    POST /predict {"instances": [{"@requestFormat": "chatCompletions", "messages": [...]}, ...]}

A format is the path of a route, or the same in one word: ``chatCompletions`` is
``/v1/chat/completions``. Each instance is answered as a separate request, all of them concurrently.
``predictions`` lists the answers in the order of the instances. Vertex AI sets environment
variables that enable the route, as it does for llama-server.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import attrs
import trio

from trioserve.api.base import errors, request_log, sse
from trioserve.api.base.answers import Answer
from trioserve.api.base.body import Incoming
from trioserve.api.base.caller import Caller
from trioserve.api.base.fields import MismatchError, RequestBody, field, json_type
from trioserve.api.base.reply import LONG, Reply, long_json, value_of
from trioserve.api.base.routes import Handler, Route
from trioserve.api.openapi import gives, takes
from trioserve.api.service import AppState
from trioserve.config import Config
from trioserve.errors import ConfigError, InvalidRequestError, TrioServeError
from trioserve.fair_limiter import offload

#: As in llama-server.
MAX_INSTANCES = 128

_FORMAT = "@requestFormat"


@json_type({"type": "array", "items": {"type": "object"}, "maxItems": MAX_INSTANCES})
def _instances(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise MismatchError("a list")
    return value


class _Predictions(Answer):
    predictions: list[Any]


@attrs.frozen(kw_only=True)
class PredictRequest(RequestBody):
    """``POST /predict``."""

    instances: list[Any] = field(read=_instances)


def routes_of(config: Config, routes: Iterable[Route]) -> list[Route]:
    """The routes that the configuration names, beside others.

    Raises:
        ConfigError: there is another route of that path.
    """
    routes = list(routes)
    taken = {route.path for route in routes}
    for path in filter(None, (config.predict_route, config.health_route)):
        if path in taken and path != "/health":
            raise ConfigError(f"{path} is a route of the server, and cannot be another one")
    added = []
    if config.health_route and config.health_route not in taken:
        health = next(route.handler for route in routes if route.path == "/health")
        added.append(Route("GET", config.health_route, health))
    if config.predict_route:
        added.append(Route("POST", config.predict_route, _predict(_formats(routes))))
    return added


def _formats(routes: Iterable[Route]) -> Mapping[str, Route]:
    """Find all routes that take a body, by path and by format."""
    by_path = {each.path: each for each in routes if each.method == "POST" and "<" not in each.path}
    named: dict[str, Route] = {}
    for path in sorted(by_path):
        named.setdefault(_format_of(path), by_path[path])
    return named | by_path


def _format_of(path: str) -> str:
    """``/v1/chat/completions`` → ``chatCompletions``."""
    words = re.split("[/_-]", path.removeprefix("/v1").removeprefix("/"))
    return words[0] + "".join(word[:1].upper() + word[1:] for word in words[1:])


def _predict(formats: Mapping[str, Route]) -> Handler:
    @takes(PredictRequest)
    @gives(_Predictions)
    async def predict(request: PredictRequest, caller: Caller, app: AppState) -> Reply:
        instances = request.instances
        predictions: list[Any] = [None] * len(instances)
        sizes = [0] * len(instances)

        async def fill(place: int) -> None:
            try:
                route, fields = _request_of(instances[place], formats)
                if route.manages:
                    caller.check_manages(f"POST {route.path}")
                predictions[place], sizes[place] = await _ask(app, caller, route.path, fields)
            except TrioServeError as error:
                predictions[place] = errors.body(error)

        async with trio.open_nursery() as nursery:
            for place in range(len(instances)):
                nursery.start_soon(fill, place)
        return long_json(lambda: {"predictions": predictions}, sum(sizes) // 32)

    return predict


def _request_of(instance: Any, formats: Mapping[str, Route]) -> tuple[Route, dict[str, Any]]:
    """Find the route of an instance, and its fields. Raises InvalidRequestError."""
    if not isinstance(instance, Mapping) or not isinstance(instance.get(_FORMAT), str):
        raise InvalidRequestError(
            f"Each instance must be an object with the string '{_FORMAT}'.", param=_FORMAT
        )
    route = formats.get(instance[_FORMAT])
    if route is None:
        raise InvalidRequestError(
            f"There is no route for the '{_FORMAT}' {instance[_FORMAT]!r:.80}.", param=_FORMAT
        )
    fields = {name: value for name, value in instance.items() if name != _FORMAT}
    if "stream" in fields or route.streams_by_default:
        fields["stream"] = False  # a prediction is whole
    return route, fields


async def _ask(app: AppState, caller: Caller, path: str, fields: dict[str, Any]) -> tuple[Any, int]:
    """Answer an instance, for the same client; gives the value, and about how many bytes it has."""
    weight = caller.held.n_bytes  # of all instances
    with app.request() as held:
        held.belongs_to(caller.held.owner)
        held.grow(await offload(lambda: len(sse.encode(fields)), weight, LONG))
        own = Caller.of_own(
            held,
            path,
            caller.api_key,
            key=caller.key,
            address=caller.address,
        )
        async with own.resources:
            reply = await app.reply_to(Incoming.of_fields(path, fields, held), own)
            make, size = await value_of(reply)
            value = await offload(make, size, LONG)
        request_log.tell(own, reply.status)
        return value, size
