"""The route of Google's Vertex AI: several requests to other routes, in one.

    POST /predict {"instances": [{"@requestFormat": "chatCompletions", "messages": [...]}, ...]}

A format is the path of a route, or the same in one word: ``chatCompletions`` is
``/v1/chat/completions``. Each instance is served as a separate request, all of them concurrently.
``predictions`` lists the answers in the order of the instances. Vertex AI sets environment
variables that enable the route, as it does for llama-server.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import quart
import trio
from quart_trio import QuartTrio
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api.base.answers import Answer
from trioserve.api.base.body import read_body_as
from trioserve.api.base.connection import current_request
from trioserve.api.base.errors import body as error_body
from trioserve.api.base.http import LONG, long_response
from trioserve.api.openapi import gives
from trioserve.api.within import ask
from trioserve.config import Config
from trioserve.errors import ConfigError, InvalidRequestError, TrioServeError
from trioserve.fair_limiter import offload

#: As in llama-server.
MAX_INSTANCES = 128

_FORMAT = "@requestFormat"

#: Headers that hold for each instance, too.
_HEADERS = frozenset({b"authorization", b"x-api-key", b"host", b"origin"})


class _Predictions(Answer):
    predictions: list[Any]


def configure(app: QuartTrio, config: Config) -> None:
    """Add the routes that the configuration names.

    Raises:
        ConfigError: the server has another route of that path.
    """
    taken = {rule.rule for rule in app.url_map.iter_rules()}
    for path in filter(None, (config.predict_route, config.health_route)):
        if path in taken and path != "/health":
            raise ConfigError(f"{path} is a route of the server, and cannot be another one")
    if config.health_route and config.health_route not in taken:
        health = next(rule.endpoint for rule in app.url_map.iter_rules() if rule.rule == "/health")
        app.add_url_rule(config.health_route, "vertex_health", app.view_functions[health])
    if config.predict_route:
        formats = _formats(app)

        @gives(_Predictions)
        async def predict() -> Response:
            return await _predict(app, formats)

        app.add_url_rule(config.predict_route, "vertex_predict", predict, methods=["POST"])


def _formats(app: QuartTrio) -> Mapping[str, str]:
    """Find the paths of all routes that take a body, by path and by format."""
    paths = [
        rule.rule
        for rule in app.url_map.iter_rules()
        if "POST" in (rule.methods or ()) and not rule.arguments
    ]
    named: dict[str, str] = {}
    for path in sorted(paths):
        named.setdefault(_format_of(path), path)
    return named | {path: path for path in paths}


def _format_of(path: str) -> str:
    """``/v1/chat/completions`` → ``chatCompletions``."""
    words = re.split("[/_-]", path.removeprefix("/v1").removeprefix("/"))
    return words[0] + "".join(word[:1].upper() + word[1:] for word in words[1:])


async def _predict(app: QuartTrio, formats: Mapping[str, str]) -> Response:
    instances = await read_body_as(_instances)
    predictions: list[Any] = [None] * len(instances)
    scope, sizes = dict(quart.request.scope), [0] * len(instances)

    async def fill(place: int) -> None:
        try:
            path, payload = _request_of(instances[place], formats)
            predictions[place], sizes[place] = await _ask(app, scope, path, payload)
        except TrioServeError as error:
            predictions[place] = error_body(error)

    async with trio.open_nursery() as nursery:
        for place in range(len(instances)):
            nursery.start_soon(fill, place)
    return await long_response(lambda: {"predictions": predictions}, sum(sizes) // 32)


def _instances(body: Mapping[str, Any]) -> list[Any]:
    instances = body.get("instances")
    if not isinstance(instances, list):
        raise InvalidRequestError.at("instances", "must be a list.")
    if len(instances) > MAX_INSTANCES:
        raise InvalidRequestError.at(
            "instances", f"may have {MAX_INSTANCES} entries, and has {len(instances)}."
        )
    return instances


def _request_of(instance: Any, formats: Mapping[str, str]) -> tuple[str, dict[str, Any]]:
    """Find the path of an instance, and its body. Raises InvalidRequestError."""
    if not isinstance(instance, Mapping) or not isinstance(instance.get(_FORMAT), str):
        raise InvalidRequestError(
            f"Each instance must be an object with the string '{_FORMAT}'.", param=_FORMAT
        )
    path = formats.get(instance[_FORMAT])
    if path is None:
        raise InvalidRequestError(
            f"There is no route for the '{_FORMAT}' {instance[_FORMAT]!r:.80}.", param=_FORMAT
        )
    payload = {name: value for name, value in instance.items() if name != _FORMAT}
    if "stream" in payload:
        payload["stream"] = False  # a prediction is whole
    return path, payload


async def _ask(
    app: QuartTrio, scope: Mapping[str, Any], path: str, payload: Mapping[str, Any]
) -> tuple[Any, int]:
    """Send a request to the app itself; gives the answer's JSON, or its text, and its bytes."""
    headers = [pair for pair in scope["headers"] if pair[0].lower() in _HEADERS]
    size = current_request().held.n_bytes
    data = await offload(lambda: json.dumps(payload).encode(), size, LONG)
    answer = await ask(app, scope, path, data, headers)
    try:
        found = await offload(lambda: json.loads(answer.body), len(answer.body), LONG)
    except ValueError:
        found = answer.body.decode()
    return found, len(answer.body)
