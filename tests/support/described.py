"""Compares what apps answer in tests with what ``/openapi.json`` says that they answer."""

from __future__ import annotations

import json
from typing import Any

from jsonschema import Draft202012Validator
from quart import request
from quart_trio import QuartTrio
from quart_trio.wrappers import TrioResponse as Response

from trioserve.api import openapi
from trioserve.api.service import Service

#: Blueprints of a router whose answers are its own; all others are a child's.
_OF_ROUTER = ("router", "router_ollama")

#: Bytes of an answer that is compared: a longer one would hold up the event loop.
_MOST = 2**16

_known: dict[frozenset[str], _Described] = {}


def watch(app: Any) -> list[str]:
    """Compare all answers of an app from now on; what differs comes into the list."""
    problems: list[str] = []
    if not isinstance(app, QuartTrio) or "trioserve" not in app.extensions:
        return problems

    async def compare(response: Response) -> Response:
        rule = request.url_rule
        is_json = (response.content_type or "").startswith("application/json")
        if rule is None or not is_json or response.status_code not in (200, 202):
            return response
        if (response.content_length or 0) > _MOST:
            return response
        is_server = isinstance(app.extensions["trioserve"], Service)
        if is_server or rule.endpoint.partition(".")[0] in _OF_ROUTER:
            problem = _described(app).problem(
                rule.rule, str(response.status_code), await response.get_data()
            )
            problems.extend([f"{request.method} {request.path}: {problem}"] if problem else [])
        return response

    app.after_request(compare)
    return problems


def _described(app: QuartTrio) -> _Described:
    key = frozenset(f"{rule.rule} {rule.endpoint}" for rule in app.url_map.iter_rules())
    if key not in _known:
        _known[key] = _Described(app)
    return _known[key]


class _Described:
    """The description of an app, in which objects have no other fields than those it names."""

    def __init__(self, app: QuartTrio) -> None:
        described = _closed(openapi.describe(app))
        self._components = described["components"]
        self._paths = described["paths"]
        self._validators: dict[tuple[str, str, str], Draft202012Validator] = {}

    def problem(self, rule: str, status: str, body: Any) -> str:
        """Say what is wrong with an answer; empty if nothing is."""
        method = request.method.lower()
        path = openapi.path_of(rule)
        if method not in self._paths.get(path, {}) or not body:
            return ""
        key = (path, method, status)
        if key not in self._validators:
            answer = self._paths[path][method]["responses"].get(status, {})
            content = answer.get("content", {})
            schema = {} if "*/*" in content else False
            schema = content.get("application/json", {"schema": schema})["schema"]
            self._validators[key] = Draft202012Validator(
                {"allOf": [schema], "components": self._components}
            )
        found = [
            f"{error.json_path}: {error.message[:300]}"
            for error in self._validators[key].iter_errors(json.loads(body))
        ]
        return found[0] if found else ""


def _closed(value: Any) -> Any:
    if isinstance(value, list):
        return [_closed(one) for one in value]
    if not isinstance(value, dict):
        return value
    closed = {name: _closed(one) for name, one in value.items()}
    if isinstance(value.get("properties"), dict) and "additionalProperties" not in value:
        closed["additionalProperties"] = False
    return closed
