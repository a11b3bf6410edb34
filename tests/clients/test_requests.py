"""The requests of programs are answered, and the answers are what their SDKs read."""

from __future__ import annotations

import json
from typing import Any

import httpx
import ollama
import pydantic
import pytest
from anthropic.types import Message, RawMessageStreamEvent
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent

from tests.support.client_requests import FILL, FILLED, REQUESTS, USER, ClientRequest
from tests.support.clients import client_of
from tests.support.scripts import answering
from trioserve.testing import ScriptedBackend

_WHOLE: dict[str, type[pydantic.BaseModel]] = {
    "/v1/chat/completions": ChatCompletion,
    "/v1/completions": Completion,
    "/v1/messages": Message,
    "/v1/responses": Response,
    "/api/chat": ollama.ChatResponse,
    "/api/generate": ollama.GenerateResponse,
    "/api/tags": ollama.ListResponse,
}
_STREAMED: dict[str, Any] = {
    **_WHOLE,
    "/v1/chat/completions": ChatCompletionChunk,
    "/v1/messages": RawMessageStreamEvent,
    "/v1/responses": ResponseStreamEvent,
}
#: The last event of a stream.
_LAST = {
    "/v1/chat/completions": "data: [DONE]",
    "/v1/completions": "data: [DONE]",
    "/v1/messages": "event: message_stop",
    "/v1/responses": "event: response.completed",
    "/api/chat": '"done":true',
    "/api/generate": '"done":true',
}


def events_of(text: str) -> list[Any]:
    """The JSON of a stream: of its events, or of its lines."""
    lines = [line.removeprefix("data: ") for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith("{")]


def read(path: str, answer: httpx.Response) -> None:
    """Read an answer as the SDK of its API does, but strictly."""
    if answer.headers["content-type"].startswith("application/json"):
        if path in _WHOLE:
            _WHOLE[path].model_validate(answer.json())
        return
    reader = pydantic.TypeAdapter(_STREAMED[path])
    for event in events_of(answer.text):
        if event.get("type") == "ping":
            continue  # which Anthropic's SDK skips
        if path == "/v1/completions" and event["choices"][0]["finish_reason"] is None:
            event["choices"][0]["finish_reason"] = "stop"  # the SDK has no type for parts
        reader.validate_python(event)
    assert _LAST[path] in answer.text[-8192:]


def scripted() -> ScriptedBackend:
    """A model that fills in forms, and otherwise says hello."""
    return answering(lambda prompt: FILLED if FILL["content"] in prompt else "Hello.", n_ctx=16384)


async def replay(client: httpx.AsyncClient, request: ClientRequest) -> None:
    """Send a request, and read its answer."""
    if request.body is None:
        answer = await client.get(request.path)
    else:
        answer = await client.post(request.path, json=request.body, headers=request.headers)
    assert answer.status_code == 200, f"{request}: {answer.text}"
    read(request.path.partition("?")[0], answer)


@pytest.mark.parametrize("program", dict.fromkeys(request.program for request in REQUESTS))
async def test_a_program_gets_its_answers(program: str) -> None:
    async with client_of(scripted()) as client:
        for request in REQUESTS:
            if request.program == program:
                await replay(client, request)


async def test_codex_finds_a_version_of_ollama_that_has_responses() -> None:
    async with client_of(answering("Hello.")) as client:
        version = (await client.get("/api/version")).json()["version"]
    assert tuple(map(int, version.split("."))) >= (0, 13, 4)


FUNCTION = {"type": "function", "function": {"name": "f"}}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (
            "/v1/chat/completions",
            {
                "tools": [{"type": "web_search"}, FUNCTION],
                "tool_choice": {"type": "function", "function": {"name": "web_search"}},
            },
        ),
        ("/v1/chat/completions", {"tools": [{"type": "mcp"}], "tool_choice": "required"}),
        (
            "/v1/responses",
            {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        ),
        (
            "/v1/messages",
            {
                "tools": [{"type": "web_search_20250305", "name": "web_search"}],
                "tool_choice": {"type": "tool", "name": "web_search"},
            },
        ),
    ],
)
async def test_a_choice_of_a_tool_that_is_left_out_is_refused(
    path: str, body: dict[str, Any]
) -> None:
    asked = {"messages": [USER], "input": "Hi", "max_tokens": 9, **body}
    async with client_of(scripted()) as client:
        answer = await client.post(path, json=asked)
    assert answer.status_code == 400
    assert "tool_choice" in answer.json()["error"]["message"]
