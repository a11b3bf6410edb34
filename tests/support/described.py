"""Compares what apps answer in tests with what ``/openapi.json`` says that they answer."""

from __future__ import annotations

import json
from collections.abc import AsyncIterable
from typing import Any

from jsonschema import Draft202012Validator

from trioserve.api import openapi
from trioserve.api.base.routes import Route
from trioserve.api.edge.app import App, Outgoing
from trioserve.api.edge.connection import Request
from trioserve.api.service import Service

#: Bytes of an answer that is compared: a longer one would hold up the event loop.
_MOST = 2**16

_known: dict[frozenset[str], _Described] = {}


def watch(app: Any) -> list[str]:
    """Compare all answers of an app from now on; what differs comes into the list."""
    problems: list[str] = []
    if not isinstance(app, App):
        return problems

    respond = app.respond

    async def watched(request: Request) -> Outgoing:
        outgoing = await respond(request)
        compare(request, outgoing)
        return outgoing

    def compare(request: Request, outgoing: Outgoing) -> None:
        is_json = outgoing.headers.get("Content-Type", "").startswith("application/json")
        is_own = isinstance(app.state, Service) or not (request.route and request.route.of_model)
        if request.route is None or not is_own or not is_json:
            return
        if outgoing.status not in (200, 202) or isinstance(outgoing.pieces, AsyncIterable):
            return
        body = b"".join(outgoing.pieces)
        outgoing.pieces = (body,)
        if len(body) <= _MOST:
            problem = _described(app).problem(request.route, str(outgoing.status), body)
            problems.extend([f"{request.method} {request.path}: {problem}"] if problem else [])

    app.respond = watched  # type: ignore[method-assign]
    return problems


def _described(app: App) -> _Described:
    key = frozenset(f"{route.method} {route.path} {route.handler!r}" for route in app.state.routes)
    if key not in _known:
        _known[key] = _Described(app)
    return _known[key]


class _Described:
    """The description of an app, in which objects have no other fields than those it names."""

    def __init__(self, app: App) -> None:
        described = _closed(openapi.describe(app.state.routes))
        self._components = described["components"]
        self._paths = described["paths"]
        self._validators: dict[tuple[str, str, str], Draft202012Validator] = {}

    def problem(self, route: Route, status: str, body: bytes) -> str:
        """Say what is wrong with an answer; empty if nothing is."""
        method, path = route.method.lower(), openapi.path_of(route.path)
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
