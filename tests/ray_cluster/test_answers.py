"""The clients of three makers, on a cluster with two models."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import anthropic
import httpx
import ollama
import openai
import pytest
import trio

from tests.ray_cluster.cluster import Cluster
from tests.ray_cluster.forms import FORMS, Form
from tests.support.ollama_api import WEATHER

pytestmark = pytest.mark.system

_HI: Any = [{"role": "user", "content": "Hi"}]


@pytest.fixture
async def client(cluster: Cluster) -> Any:
    async with httpx.AsyncClient(base_url=cluster.url, timeout=60) as client:
        yield client


async def _in_thread(use: Callable[[], None]) -> None:
    await trio.to_thread.run_sync(use)


@pytest.mark.parametrize("model", ["ash", "oak"])
async def test_openai(cluster: Cluster, model: str) -> None:
    def use() -> None:
        with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as client:
            assert {one.id for one in client.models.list()} >= {"ash", "oak"}
            chat: Any = client.chat.completions.create
            whole = chat(model=model, messages=_HI, max_tokens=20, seed=1, temperature=0)
            assert whole.usage.completion_tokens <= 20
            chunks = list(
                chat(model=model, messages=_HI, max_tokens=20, seed=1, temperature=0, stream=True)
            )
            text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
            assert text == whole.choices[0].message.content != ""
            called = chat(model=model, messages=_HI, tools=[WEATHER], tool_choice="required")
            assert called.choices[0].message.tool_calls[0].function.name == "weather"
            completion = client.completions.create(model=model, prompt="Once", max_tokens=5)
            assert completion.usage is not None
            assert completion.usage.completion_tokens == 5
            response = client.responses.create(model=model, input="Hi", max_output_tokens=20)
            assert response.model == model
            with client.responses.stream(model=model, input="Hi", max_output_tokens=20) as stream:
                types = [event.type for event in stream]
            assert types[0] == "response.created"
            assert types[-1] in ("response.completed", "response.incomplete")

    await _in_thread(use)


@pytest.mark.parametrize("model", ["ash", "oak"])
async def test_anthropic(cluster: Cluster, model: str) -> None:
    def use() -> None:
        with anthropic.Anthropic(base_url=cluster.url, api_key="any", max_retries=0) as client:
            message = client.messages.create(model=model, max_tokens=20, messages=_HI)
            assert message.model == model
            assert message.usage.output_tokens <= 20
            with client.messages.stream(model=model, max_tokens=20, messages=_HI) as stream:
                text = "".join(stream.text_stream)
                assert stream.get_final_text() == text
            assert client.messages.count_tokens(model=model, messages=_HI).input_tokens > 0
            assert {one.id for one in client.models.list()} >= {"ash", "oak"}

    await _in_thread(use)


@pytest.mark.parametrize("model", ["ash", "oak"])
async def test_ollama(cluster: Cluster, model: str) -> None:
    def use() -> None:
        with ollama.Client(host=cluster.url, timeout=60) as client:
            options = {"num_predict": 20, "temperature": 0}
            assert client.chat(model, _HI, options=options).done
            parts = list(client.chat(model, _HI, stream=True, options=options))
            assert [part.done for part in parts].count(True) == 1
            assert parts[-1].done
            assert client.generate(model, "Once", options=options).done
            listed = [str(one.model) for one in client.list().models]
            assert {name.removesuffix(":latest") for name in listed} >= {"ash", "oak"}
            assert client.show(model).modelinfo

    await _in_thread(use)


@pytest.mark.parametrize("form", FORMS, ids=[form.name for form in FORMS])
async def test_an_unknown_model_and_a_wrong_field(client: httpx.AsyncClient, form: Form) -> None:
    answer = await client.post(form.path, json=form.write("unknown", "Hi", 5))
    assert answer.status_code == 404
    assert "unknown" in str(answer.json()["error"])
    answer = await client.post(form.path, content=b"{")
    assert answer.status_code == 400
    assert answer.json()["error"]
    wrong = {"temperature": "warm", "options": {"temperature": "warm"}}
    answer = await client.post(form.path, json=form.write("ash", "Hi", 5) | wrong)
    assert answer.status_code == 400
    assert "temperature" in str(answer.json()["error"])


async def test_the_other_routes(client: httpx.AsyncClient) -> None:
    assert (await client.get("/health")).status_code == 200
    ids = {one["id"] for one in (await client.get("/v1/models")).json()["data"]}
    assert ids >= {"ash", "oak"}
    assert (await client.get("/nowhere")).status_code == 404
    assert (await client.get("/props?model=oak")).json()["total_slots"] == 4
    body = {"model": "oak", "content": "Hello there"}
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    answer = await client.post("/detokenize", json={"model": "oak", "tokens": tokens})
    assert answer.json()["content"].strip() == "Hello there"
    applied = await client.post("/apply-template", json={"model": "ash", "messages": _HI})
    assert "Hi" in applied.json()["prompt"]
