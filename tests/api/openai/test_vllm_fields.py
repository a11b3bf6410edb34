"""Fields of vLLM's that clients send to OpenAI's routes, and that have an effect here, too."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from tests.support.clients import client_of
from tests.support.scripts import HI, answering
from tests.support.served_model import served
from trioserve.config import Config

ROUTES = {"/v1/chat/completions": {"messages": HI}, "/v1/completions": {"prompt": "Hi"}}


def test_an_output_has_as_many_tokens_as_it_must() -> None:
    with served(Config(threads=1, ctx_size=512, parallel=1)) as model:
        ends = {str(token): 100 for token in model.vocab.end_of_generation}
        for path, body in ROUTES.items():
            for n in (0, 1, 7):
                fields = {"logit_bias": ends, "min_tokens": n, "max_tokens": 20}
                answer = model.post(path, {**body, **fields})
                assert answer["usage"]["completion_tokens"] == n + 1  # with the end
                assert answer["choices"][0]["finish_reason"] == "stop"
            answer = model.post(path, {**body, "guided_choice": ["yes"], "min_tokens": 20})
            assert answer["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("path", ROUTES)
async def test_special_tokens_have_names(path: str) -> None:
    async with client_of(answering("Yo")) as client:
        for skip, end in ((True, ""), (False, "<eos>")):
            answer = await client.post(path, json={**ROUTES[path], "skip_special_tokens": skip})
            choice = answer.json()["choices"][0]
            said = choice["text"] if "text" in choice else choice["message"]["content"]
            assert said == f"Yo{end}"


async def chunks_of(client: httpx.AsyncClient, path: str, options: dict[str, Any]) -> list[Any]:
    body = {**ROUTES[path], "stream": True, "stream_options": options}
    lines = (await client.post(path, json=body)).text.split("\n")
    return [json.loads(line[6:]) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("include", [True, False])
async def test_each_chunk_has_the_usage(path: str, include: bool) -> None:
    options = {"continuous_usage_stats": True, "include_usage": include}
    async with client_of(answering("Hello"), stream_interval_ms=0) as client:
        chunks = await chunks_of(client, path, options)
        without = await chunks_of(client, path, {"include_usage": include})
    used = [chunk["usage"] for chunk in chunks if "usage" in chunk]
    assert all(one["prompt_tokens"] == used[0]["prompt_tokens"] > 0 for one in used)
    assert all(one["total_tokens"] == sum(list(one.values())[:2]) for one in used)
    assert used[-1]["completion_tokens"] == len("Hello") + 1  # with the end
    so_far = ""
    for chunk in chunks:
        if chunk["choices"] and (text := text_in(chunk["choices"][0])):
            so_far += text
            assert chunk["usage"]["completion_tokens"] - len(so_far) in (0, 1)
    assert so_far == "Hello"
    assert sum("usage" in chunk for chunk in without) == (include or path == "/v1/completions")


def text_in(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["delta"].get("content") or ""
