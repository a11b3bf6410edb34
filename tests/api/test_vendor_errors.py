"""Errors in the form of each vendor: in place of an answer, and at the end of its stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from tests.support.anthropic_api import ASK
from tests.support.broken_strategies import SECRET
from tests.support.clients import client_of
from tests.support.scripts import HI, answering
from trioserve.api.anthropic import routes as anthropic
from trioserve.api.base import vendors
from trioserve.api.base.vendors import Vendor
from trioserve.errors import (
    KVCacheFullError,
    ModelLoadingError,
    NotSupportedError,
    QueueFullError,
    StalledReaderError,
    TemplateError,
    TrioServeError,
)
from trioserve.testing import ScriptedBackend

ID = {"X-Request-Id": "r1"}
FAILED = "The inference engine failed. The log has more, under r1."
BROKEN: dict[str, Any] = {
    "strategy": "tests.support.broken_strategies:Raises",
    "on_engine_failure": "stay",
}

#: Statuses with the types of their errors in the common form, and in Anthropic's.
TYPES = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    404: ("not_found_error", "not_found_error"),
    405: ("invalid_request_error", "invalid_request_error"),
    413: ("invalid_request_error", "request_too_large"),
}


def common(status: int, message: str) -> Any:
    error = {"code": status, "message": message, "type": TYPES[status][0], "param": None}
    return {"error": error}


def of_anthropic(kind: str, message: str) -> Any:
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "r1"}


FORMS: dict[str, Callable[[int, str], Any]] = {
    "anthropic": lambda status, message: of_anthropic(TYPES[status][1], message),
    "ollama": lambda status, message: {"error": message},
    "cohere": lambda status, message: {"id": "r1", "message": message},
}


def path_of(vendor: Vendor) -> str:
    """The first route of a vendor that takes JSON of any client."""
    return next(
        route.path
        for routes in vendor.routes
        for route in routes
        if route.takes is not None
        and (route.method, route.content) == ("POST", "application/json")
        and not route.manages
    )


@pytest.mark.parametrize("prefix", ["", "/api"])
@pytest.mark.parametrize("vendor", vendors.registered, ids=lambda vendor: vendor.name)
async def test_errors_have_the_form_of_their_vendor(vendor: Vendor, prefix: str) -> None:
    path = path_of(vendor)
    wrong: list[tuple[str, str, bytes, int, str]] = [
        (
            *("POST", path, b"{", 400),
            "The body is not valid JSON: Expecting property name enclosed in double quotes: "
            "line 1 column 2 (char 1).",
        ),
        ("PUT", path, b"", 405, "This route does not take this method."),
        (
            *("POST", path, b"x" * 1001, 413),
            "The body is larger than max_body_size, which is 1000 bytes.",
        ),
    ]
    if vendor.paths:
        below = f"{path}/nothing/at/all"
        wrong.append(("POST", below, b"{}", 404, f"There is no {below} here."))
    form = FORMS.get(vendor.name, common)
    config: dict[str, Any] = {"max_body_size": 1000, "api_keys": ("k",), "api_prefix": prefix}
    async with client_of(answering("Hi"), **config) as client:
        for key in ({}, {"x-api-key": "wrong"}):
            answer = await client.post(f"{prefix}{path}", json={}, headers=ID | key)
            assert (answer.status_code, answer.json()) == (401, form(401, "Invalid API Key"))
        client.headers.update(ID | {"x-api-key": "k"})
        for method, where, content, status, message in wrong:
            answer = await client.request(method, f"{prefix}{where}", content=content)
            assert (answer.status_code, answer.json()) == (status, form(status, message))
            if vendor.id_header is not None:
                assert answer.headers[vendor.id_header] == "r1"
        for where in (f"{each}x" for each in vendor.paths):  # which is another's path
            error = (await client.post(f"{prefix}{where}", json={})).json()
            assert error.keys() == {"error"} and error["error"]["code"] == 404


async def test_a_prompt_that_is_too_long_has_the_words_that_anthropic_s_clients_look_for() -> None:
    body = ASK | {"messages": [{"role": "user", "content": "x" * 5000}]}
    async with client_of(answering("Hi")) as client:
        n_tokens = (await client.post("/v1/messages/count_tokens", json=body)).json()
        answer = await client.post("/v1/messages", json=body, headers=ID)
    message = f"prompt is too long: {n_tokens['input_tokens']} tokens > 4096 maximum"
    assert answer.status_code == 400
    assert answer.json() == of_anthropic("invalid_request_error", message)


@pytest.mark.parametrize(
    ("kind", "status", "expected"),
    [
        (NotSupportedError, 501, "api_error"),
        (StalledReaderError, 408, "timeout_error"),
        (TemplateError, 400, "invalid_request_error"),
        (QueueFullError, 429, "rate_limit_error"),
        (ModelLoadingError, 503, "overloaded_error"),
        (KVCacheFullError, 500, "api_error"),
    ],
)
def test_the_type_of_anthropic_s_error_is_that_of_its_status(
    kind: type[TrioServeError], status: int, expected: str
) -> None:
    assert kind.status == status
    message = "No. The log has more, under r1." if status == 500 else "No."
    assert anthropic.body(kind("No."), "r1") == of_anthropic(expected, message)


# -- streams


def backend() -> ScriptedBackend:
    return ScriptedBackend(lambda prompt: "Hello there, how do you do?", n_slots=4)


def events_of(answer: httpx.Response) -> list[tuple[str, Any]]:
    """The events of a stream, or its lines: their names and data."""
    assert answer.status_code == 200
    if answer.headers["content-type"] == "application/x-ndjson":
        return [("", json.loads(line)) for line in answer.text.splitlines()]
    assert answer.headers["content-type"] == "text/event-stream"
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    events = []
    for block in blocks:
        if block.startswith("retry: "):  # for an `EventSource`
            continue
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        events.append((fields.get("event", ""), json.loads(fields["data"])))
    return events


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completion", {"prompt": ["a", "b"]}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": HI, "n": 2}),
        ("/v1/responses", {"input": "Hi"}),
        ("/v1/messages", {"messages": HI, "max_tokens": 99}),
        ("/api/chat", {"messages": HI}),
    ],
    ids=lambda value: value if isinstance(value, str) else ",".join(value),
)
async def test_a_stream_ends_with_one_error(path: str, body: dict[str, Any]) -> None:
    async with client_of(backend(), **BROKEN) as client:
        with capture_logs() as logs:
            answer = await client.post(path, json={**body, "stream": True}, headers=ID)
        again = await client.post(path, json={**body, "stream": False}, headers=ID)
    events = events_of(answer)
    assert len(events) > 1, "it has begun"
    assert all("error" not in data for _, data in events[:-1] if "response" not in data)
    name, last = events[-1]
    if path in ("/v1/responses", "/v1/messages"):
        assert (name, last["type"]) == ("error", "error")
    else:
        assert (name, list(last)) == ("", ["error"])
    if path == "/v1/responses":
        assert events[-2][0] == "response.failed"
        assert events[-2][1]["response"]["error"]["message"] == FAILED
    for error in (last["error"], again.json()["error"]):
        assert (error if path == "/api/chat" else error["message"]) == FAILED
    assert again.status_code == 500
    for text in (answer.text, again.text):
        assert SECRET not in text
        assert "RuntimeError" not in text
    told = [line for line in logs if "traceback" in line or line.get("exc_info")]
    assert [line["event"] for line in told] == ["the engine has failed"]


async def test_a_stream_for_an_event_source_ends_with_one_error() -> None:
    async with client_of(backend(), **BROKEN) as client:
        headers = {**ID, "Prefer": "respond-async"}
        body = {"messages": HI, "stream": True}
        put = await client.post("/v1/chat/completions", json=body, headers=headers)
        answer = await client.get(put.headers["Location"])
    *_, (name, error), last = events_of(answer)
    assert (name, error["error"]["message"]) == ("", FAILED)
    assert last == ("done", {})


async def test_a_model_whose_engine_has_failed_is_loaded_after_it_was_unloaded() -> None:
    async with client_of(backend(), **BROKEN) as client:
        assert (await client.post("/completion", json={"prompt": "a"})).status_code == 500
        statuses = []
        for command in ("load", "unload", "load"):
            answer = await client.post(f"/models/{command}", json={"model": "scripted"})
            health = await client.get("/health")
            statuses.append((answer.status_code, health.status_code))
    assert statuses == [(503, 503), (200, 200), (200, 200)]
