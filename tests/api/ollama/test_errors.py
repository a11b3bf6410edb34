"""Errors of Ollama's routes, with the whole of their bodies."""

from __future__ import annotations

import time
from typing import Any

import ollama
import pytest

from tests.support.clients import client_and_service, client_of
from tests.support.http_server import serving_script
from tests.support.ollama_api import ASK, lines_in, use_ollama
from tests.support.scripts import answering
from trioserve.api.ollama.request import OllamaChatRequest
from trioserve.errors import DecodeError
from trioserve.testing import ScriptedBackend

ID = {"X-Request-Id": "r1"}
FAILED = {"error": "The inference engine failed. The log has more, under r1."}


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "message"),
    [
        (
            "POST",
            "/api/chat",
            b"[]",
            400,
            "The body must be a JSON object.",
        ),
        ("POST", "/api/chat", b'{"messages": 5}', 400, "'messages' must be a list of objects."),
        ("POST", "/api/show", b"{}", 400, "'model' is required."),
        ("POST", "/api/copy", b"{}", 404, "File Not Found"),
        ("GET", "/api/chat", b"", 405, "This route does not take this method."),
        (
            "POST",
            "/api/generate",
            b'{"prompt": "' + b"x" * 20_000 + b'"}',
            413,
            "The body is larger than max_body_size, which is 10000 bytes.",
        ),
    ],
)
async def test_an_error(method: str, path: str, body: bytes, status: int, message: str) -> None:
    async with client_of(answering("Hi"), max_body_size=10_000) as client:
        answer = await client.request(method, path, content=body)
    assert answer.json() == {"error": message}
    assert answer.status_code == status


async def test_a_failure_before_the_first_part_has_a_status() -> None:
    backend = answering("Hello")
    backend.fail_next = DecodeError("The batch is cursed.")
    async with client_of(backend) as client:
        answer = await client.post("/api/chat", json=ASK, headers=ID)
    assert answer.status_code == 500
    assert answer.json() == FAILED


async def test_a_failure_ends_a_stream_that_has_begun() -> None:
    backend = answering("Hello you")

    def fail_later(backend: ScriptedBackend) -> None:
        if backend.n_decodes == 8:
            raise DecodeError("The batch is cursed.")

    backend.on_decode = fail_later
    async with client_of(backend, on_engine_failure="stay") as client:
        answer = await client.post("/api/chat", json=ASK, headers=ID)
    assert answer.status_code == 200
    *before, last = lines_in(answer.text)
    assert before and not any(part["done"] for part in before)
    assert last == FAILED


async def test_errors_as_the_client_raises_them() -> None:
    def use(client: ollama.Client) -> None:
        for stream in (True, False):
            with pytest.raises(ollama.ResponseError, match="num_gpu") as caught:
                for _ in client.chat(**ASK, options={"num_gpu": 5}, stream=stream):
                    pass
            assert caught.value.status_code == 400
        with pytest.raises(ollama.ResponseError) as caught:
            client.show("another")
        assert caught.value.status_code == 404

    await use_ollama(answering("Hi"), use)


async def test_a_key() -> None:
    async with serving_script(answering("Hi"), api_keys=("secret",)) as (url, _):
        wrong, right = (
            ollama.AsyncClient(host=url, headers={"Authorization": f"Bearer {key}"})
            for key in ("wrong", "secret")
        )
        async with wrong, right:
            with pytest.raises(ollama.ResponseError, match="Invalid API Key") as caught:
                await wrong.list()
            assert caught.value.status_code == 401
            assert (await right.chat(**ASK)).message.content == "Hi"


async def test_a_queue_that_is_full_and_a_server_that_closes() -> None:
    backend = answering("x" * 3000, n_slots=1)
    backend.on_decode = lambda backend: time.sleep(0.001)
    async with (
        client_and_service(backend, max_queue=0) as (client, service),
        service.server.stream("hold the slot") as stream,
    ):
        await anext(stream)
        answer = await client.post("/api/chat", json=ASK)
        assert answer.status_code == 429
        assert int(answer.headers["Retry-After"]) >= 1
        assert answer.json() == {"error": "0 requests are waiting, and the limit is 0."}
        await service.drain(0)
        answer = await client.post("/api/chat", json=ASK)
        assert answer.status_code == 503
        assert answer.json() == {"error": "The server is shutting down"}


async def test_a_prefix_before_all_routes() -> None:
    async with client_of(answering("Hi"), api_prefix="/api") as client:
        answer = await client.post("/api/api/show", json={})
        assert answer.json() == {"error": "'model' is required."}
        answer = await client.post("/api/v1/chat/completions", json={})
        assert answer.json()["error"]["message"] == "'messages' is required."


async def test_a_request_that_has_no_time_left() -> None:
    async with client_of(answering("Hello you " * 50)) as client:
        answer = await client.post("/api/chat", json=ASK | {"timeout": 1e-9})
    assert answer.status_code == 504
    assert answer.json() == {"error": "The request's deadline has passed."}


async def test_something_that_nobody_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(body: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(OllamaChatRequest, "parse", fail)
    async with client_of(answering("Hi")) as client:
        answer = await client.post("/api/chat", json=ASK, headers=ID)
    assert answer.status_code == 500
    assert answer.json() == {"error": "Internal error. The log has more, under r1."}


async def test_other_routes_keep_their_form() -> None:
    async with client_of(answering("Hi")) as client:
        answer: dict[str, Any] = (await client.post("/apix", json={})).json()
    assert isinstance(answer["error"], dict)
