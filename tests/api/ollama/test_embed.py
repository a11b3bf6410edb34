"""Ollama's routes for embeddings, with its client."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import ollama
import pytest

from tests.support.clients import client_of, client_of_app
from tests.support.gguf_models import CLS, SEP, WIDTH, Bert, write_bert
from tests.support.ollama_api import with_client
from tests.support.scripts import answering
from trioserve.app import create_app
from trioserve.config import Config


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Bert:
    return write_bert(tmp_path_factory.mktemp("models") / "mean.gguf")


def client_of_model(path: Path, **config: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return client_of_app(create_app(Config(model=str(path), embeddings=True, threads=1, **config)))


async def vectors(client: httpx.AsyncClient, **body: Any) -> Any:
    answer = await client.post("/api/embed", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_client(model: Bert) -> None:
    def ask(sdk: ollama.Client) -> None:
        texts = ["the cat", "what is a panda?"]
        answer = sdk.embed("any", texts, options={"num_ctx": 16, "num_thread": 0})
        assert [len(one) for one in answer.embeddings] == [WIDTH, WIDTH]
        assert np.linalg.norm(answer.embeddings, axis=1) == pytest.approx([1, 1])
        assert answer.model == "mean.gguf"
        assert answer.prompt_eval_count == 4 + 7
        assert answer.total_duration and answer.load_duration
        one = sdk.embed("any", texts[0])
        assert one.embeddings[0] == pytest.approx(answer.embeddings[0], abs=1e-4)
        short = sdk.embed("any", texts[0], dimensions=4).embeddings[0]
        assert len(short) == 4 and np.linalg.norm(short) == pytest.approx(1)
        plain = np.array(sdk.embeddings("any", texts[0]).embedding)
        assert np.linalg.norm(plain) != pytest.approx(1)
        assert plain / np.linalg.norm(plain) == pytest.approx(one.embeddings[0], abs=1e-4)
        assert sdk.show("mean.gguf").capabilities == ["embedding"]

    async with client_of_model(model.path) as client:
        await with_client(str(client.base_url), ask)


async def test_a_text_that_is_too_long_is_cut(model: Bert) -> None:
    async with client_of_model(model.path, ctx_size=8, flash_attn="off") as client:
        long, short = "the cat " * 20, "the cat"
        data = await vectors(client, input=[long, short])
        assert data["prompt_eval_count"] == 8 + 4
        cut = [CLS, *[5, 6] * 3, SEP]
        tokens = (
            await client.post("/tokenize", json={"content": long, "add_special": True})
        ).json()
        assert tokens["tokens"][:7] == cut[:7] and tokens["tokens"][-1] == SEP
        same = (await client.post("/v1/embeddings", json={"input": [cut]})).json()
        assert data["embeddings"][0] == pytest.approx(same["data"][0]["embedding"], abs=1e-5)
        refused = await client.post("/api/embed", json={"input": long, "truncate": False})
        assert refused.status_code == 400
        assert "too large" in refused.json()["error"]
        older = await client.post("/api/embeddings", json={"prompt": long})
        assert older.status_code == 400


async def test_a_refusal_names_the_parameter_and_an_empty_input_loads_the_model(
    model: Bert,
) -> None:
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"input": ["a", 5]}, "input"),
        ({"options": {"num_ctx": 0}}, "options.num_ctx"),
    ]
    async with client_of_model(model.path) as client:
        for fields, param in wrong:
            answer = await client.post("/api/embed", json={"input": "a"} | fields)
            assert answer.status_code == 400
            assert f"'{param}'" in answer.json()["error"]
        for empty in ("", []):
            data = await vectors(client, input=empty, options={"num_gpu": 3, "num_ctx": 10**6})
            assert data["embeddings"] == []
            assert data["prompt_eval_count"] == 0
        answer = await client.post("/api/embeddings", json={"prompt": ""})
        assert answer.json() == {"embedding": []}


async def test_pooling_of_none_has_no_vector_for_a_text(model: Bert) -> None:
    async with client_of_model(model.path, pooling="none") as client:
        answer = await client.post("/api/embed", json={"input": "a"})
    assert answer.status_code == 400
    assert "POST /embeddings" in answer.json()["error"]


async def test_a_server_that_makes_text_makes_no_vectors() -> None:
    async with client_of(answering("Hi")) as client:
        for path in ("/api/embed", "/api/embeddings"):
            answer = await client.post(path, json={"input": "a", "prompt": "a"})
            assert answer.status_code == 501
            assert "--embeddings" in answer.json()["error"]
