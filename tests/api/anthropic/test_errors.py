"""Every error of Anthropic's routes, with the whole of its body."""

from __future__ import annotations

import json
import time
from typing import Any

import anthropic
import pytest

from tests.support.anthropic_api import ASK
from tests.support.clients import client_and_service, client_of, named_events_in, use_anthropic
from tests.support.scripts import answering
from trioserve.api.anthropic import routes as anthropic_errors
from trioserve.api.anthropic.request import MessagesRequest
from trioserve.errors import (
    DecodeError,
    KVCacheFullError,
    ModelLoadingError,
    NotSupportedError,
    StalledReaderError,
    TemplateError,
    TrioServeError,
)
from trioserve.testing import ScriptedBackend


def error(kind: str, message: str) -> dict[str, Any]:
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": "r1"}


ID = {"X-Request-Id": "r1"}
FAILED = "The inference engine failed. The log has more, under r1."
LATE = json.dumps(ASK | {"timeout": 1e-9}).encode()
BIG = json.dumps(ASK | {"messages": [{"role": "user", "content": "x" * 5000}]}).encode()


ERRORS: list[tuple[str, str, bytes, int, str, str]] = [
    (
        *("POST", "/v1/messages", b"{", 400, "invalid_request_error"),
        "The body is not valid JSON: Expecting property name enclosed in double quotes: "
        "line 1 column 2 (char 1).",
    ),
    (
        *("POST", "/v1/messages/count_tokens", b"{}", 400, "invalid_request_error"),
        "'messages' is required.",
    ),
    (
        *("POST", "/v1/messages/nothing/at/all", b"{}", 404, "not_found_error"),
        "There is no /v1/messages/nothing/at/all here.",
    ),
    (
        *("GET", "/v1/messages", b"", 405, "invalid_request_error"),
        "This route does not take this method.",
    ),
    (
        *("POST", "/v1/messages", BIG * 3, 413, "request_too_large"),
        "The body is larger than max_body_size, which is 10000 bytes.",
    ),
    (
        *("POST", "/v1/messages", LATE, 504, "timeout_error"),
        "The request's deadline has passed.",
    ),
]


async def test_errors_have_anthropic_s_form() -> None:
    async with client_of(answering("Hi"), max_body_size=10_000) as client:
        for method, path, body, status, kind, message in ERRORS:
            answer = await client.request(method, path, content=body, headers=ID)
            assert (answer.status_code, answer.json()) == (status, error(kind, message))
        # Other routes keep their form.
        for path in ("/v1/chat/completions", "/v1/messagesx"):
            answer = await client.post(path, json={})
            assert set(answer.json()) == {"error"}
            assert "request-id" not in answer.headers


async def test_a_prompt_that_is_too_long() -> None:
    async with client_of(answering("Hi")) as client:
        count = await client.post("/v1/messages/count_tokens", content=BIG)
        answer = await client.post("/v1/messages", content=BIG, headers=ID)
    assert answer.status_code == 400
    assert answer.json() == error(
        "invalid_request_error",
        f"prompt is too long: {count.json()['input_tokens']} tokens > 4096 maximum",
    )


async def test_a_key_that_is_missing_or_wrong() -> None:
    async with client_of(answering("Hi"), api_keys=("secret",)) as client:
        for headers in ({}, {"x-api-key": "wrong"}):
            answer = await client.post("/v1/messages", json=ASK, headers=ID | headers)
            assert answer.json() == error("authentication_error", "Invalid API Key")
            assert answer.status_code == 401
            assert answer.headers["request-id"] == "r1"
        for headers in ({"x-api-key": "secret"}, {"Authorization": "Bearer secret"}):
            answer = await client.post("/v1/messages", json=ASK, headers=headers)
            assert answer.status_code == 200


async def test_a_failure_has_a_status_or_ends_the_stream_that_has_begun() -> None:
    backend = answering("Hello you")
    backend.fail_next = DecodeError("The batch is cursed.")
    async with client_of(backend, on_engine_failure="stay") as client:
        early = await client.post("/v1/messages", json=ASK | {"stream": True}, headers=ID)
        n_before = backend.n_decodes

        def fail_later(backend: ScriptedBackend) -> None:
            if backend.n_decodes == n_before + 8:
                raise DecodeError("The batch is cursed.")

        backend.on_decode = fail_later
        late = await client.post("/v1/messages", json=ASK | {"stream": True}, headers=ID)
    assert (early.status_code, early.json()) == (500, error("api_error", FAILED))
    assert late.status_code == 200
    *before, last = named_events_in(late.text)
    assert [each["type"] for each in before[:3]] == ["message_start", "ping", "content_block_start"]
    assert last == error("api_error", FAILED)


async def test_errors_as_the_sdk_raises_them() -> None:
    def use(client: anthropic.Anthropic) -> None:
        with pytest.raises(anthropic.BadRequestError) as caught:
            client.messages.create(**ASK | {"messages": []})
        assert caught.value.type == "invalid_request_error"
        assert caught.value.request_id
        assert caught.value.body["request_id"] == caught.value.request_id  # type: ignore[index]
        with pytest.raises(anthropic.NotFoundError):
            client.messages.batches.retrieve("b1")
        other = client.with_options(api_key="wrong")
        with pytest.raises(anthropic.AuthenticationError):
            other.messages.create(**ASK)

    await use_anthropic(answering("Hi"), use, api_keys=("secret",))


async def test_a_queue_that_is_full_and_a_server_that_closes() -> None:
    backend = answering("x" * 3000, n_slots=1)
    backend.on_decode = lambda backend: time.sleep(0.001)
    async with (
        client_and_service(backend, max_queue=0) as (client, service),
        service.server.stream_complete("hold the slot") as stream,
    ):
        await anext(stream)
        answer = await client.post("/v1/messages", json=ASK, headers=ID)
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) >= 1
        message = "0 requests are waiting, and the limit is 0."
        assert answer.json() == error("rate_limit_error", message)
        await service.drain(0)
        answer = await client.post("/v1/messages", json=ASK, headers=ID)
        assert answer.status_code == 503
        assert answer.json() == error("overloaded_error", "The server is shutting down")


async def test_a_prefix_before_all_routes() -> None:
    async with client_of(answering("Hi"), api_prefix="/api") as client:
        answer = await client.post("/api/v1/messages", json={}, headers=ID)
        assert answer.json() == error("invalid_request_error", "'messages' is required.")
        answer = await client.post("/api/v1/messages", json=ASK)
        assert answer.status_code == 200


async def test_an_unexpected_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(body: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(MessagesRequest, "parse", fail)
    async with client_of(answering("Hi")) as client:
        answer = await client.post("/v1/messages", json=ASK, headers=ID)
    assert answer.status_code == 500
    assert answer.json() == error("api_error", "Internal error. The log has more, under r1.")


@pytest.mark.parametrize(
    ("kind", "status", "expected"),
    [
        (NotSupportedError, 501, "api_error"),
        (StalledReaderError, 408, "timeout_error"),
        (TemplateError, 400, "invalid_request_error"),
        (ModelLoadingError, 503, "overloaded_error"),
        (KVCacheFullError, 500, "api_error"),
    ],
)
def test_the_type_of_an_error_is_that_of_its_status(
    kind: type[TrioServeError], status: int, expected: str
) -> None:
    assert kind.status == status
    message = "No. The log has more, under r1." if status == 500 else "No."
    assert anthropic_errors.body(kind("No."), "r1") == error(expected, message)
