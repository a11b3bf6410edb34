"""Errors of Ollama's routes, with the whole of their bodies."""

from __future__ import annotations

from typing import Any

import ollama
import pytest

from tests.support.clients import client_of
from tests.support.http_server import serving_script
from tests.support.ollama_api import ASK, lines_in, use_ollama
from tests.support.scripts import answering
from trioserve.errors import DecodeError
from trioserve.testing import ScriptedBackend

ID = {"X-Request-Id": "r1"}
FAILED = {"error": "The inference engine failed. The log has more, under r1."}


LONG = b'{"prompt": "' + b"x" * 20_000 + b'"}'
LATE = b'{"messages": [{"role": "user", "content": "Hi"}], "timeout": 1e-9}'
ERRORS = [
    ("POST", "/api/chat", b"[]", 400, "The body must be a JSON object."),
    ("POST", "/api/chat", b'{"messages": 5}', 400, "'messages' must be a list of objects."),
    ("POST", "/api/show", b"{}", 400, "'model' is required."),
    ("POST", "/api/shows", b"{}", 404, "There is no /api/shows here; did you mean /api/show?"),
    ("GET", "/api/chat", b"", 405, "This route does not take this method."),
    (
        *("POST", "/api/generate", LONG, 413),
        "The body is larger than max_body_size, which is 10000 bytes.",
    ),
    ("POST", "/api/chat", LATE, 504, "The request's deadline has passed."),
]


async def test_errors_have_ollama_s_form() -> None:
    async with client_of(answering("Hi"), max_body_size=10_000) as client:
        for method, path, body, status, message in ERRORS:
            answer = await client.request(method, path, content=body)
            assert (answer.status_code, answer.json()) == (status, {"error": message})
        # Other routes keep their form.
        other: dict[str, Any] = (await client.post("/apix", json={})).json()
    assert isinstance(other["error"], dict)


async def test_a_failure_has_a_status_or_ends_the_stream_that_has_begun() -> None:
    backend = answering("Hello you")
    backend.fail_next = DecodeError("The batch is cursed.")
    async with client_of(backend, on_engine_failure="stay") as client:
        early = await client.post("/api/chat", json=ASK, headers=ID)
        n_before = backend.n_decodes

        def fail_later(backend: ScriptedBackend) -> None:
            if backend.n_decodes == n_before + 8:
                raise DecodeError("The batch is cursed.")

        backend.on_decode = fail_later
        late = await client.post("/api/chat", json=ASK, headers=ID)
    assert (early.status_code, early.json()) == (500, FAILED)
    assert late.status_code == 200
    *before, last = lines_in(late.text)
    assert before and not any(part["done"] for part in before)
    assert last == FAILED


async def test_errors_as_the_client_raises_them() -> None:
    def use(client: ollama.Client) -> None:
        for stream in (True, False):
            with pytest.raises(ollama.ResponseError, match="top_p") as caught:
                for _ in client.chat(**ASK, options={"top_p": -1}, stream=stream):
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


async def test_a_prefix_before_all_routes() -> None:
    async with client_of(answering("Hi"), api_prefix="/api") as client:
        answer = await client.post("/api/api/show", json={})
        assert answer.json() == {"error": "'model' is required."}
        answer = await client.post("/api/v1/chat/completions", json={})
        assert answer.json()["error"]["message"] == "'messages' is required."
