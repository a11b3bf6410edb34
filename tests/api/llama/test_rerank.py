"""The routes that rank documents, over a real socket."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
import pytest
from gguf import PoolingType

from tests.support.clients import client_of, client_of_app, error_body
from tests.support.gguf_models import write_bert
from trioserve.app import create_app
from trioserve.config import Config

DOCUMENTS = ["a cat", "dog", "the mat"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "rank.gguf"
    return write_bert(path, pooling=PoolingType.RANK, labels=["relevant"], seed=2).path


@pytest.fixture
async def client(model: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with opened(model) as client:
        yield client


def opened(model: Path, **config: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return client_of_app(create_app(Config(model=str(model), reranking=True, threads=1, **config)))


ROUTES = ("/rerank", "/reranking", "/v1/rerank", "/v1/reranking")


async def test_the_form_of_jina_and_cohere(client: httpx.AsyncClient, model: Path) -> None:
    body = {"model": "m", "query": "cat", "documents": DOCUMENTS}
    for path in ROUTES:
        answer = await client.post(path, json=body)
        assert answer.status_code == 200
        written = answer.json()
        results = written.pop("results")
        usage = {"prompt_tokens": 20, "total_tokens": 20}
        assert written == {"model": model.name, "object": "list", "usage": usage}
        assert sorted(result["index"] for result in results) == [0, 1, 2]
        assert all(set(result) == {"index", "relevance_score"} for result in results)
        scores = [result["relevance_score"] for result in results]
        assert scores == sorted(scores, reverse=True)


async def test_the_best_ones_with_their_text(client: httpx.AsyncClient) -> None:
    body = {"query": "cat", "documents": [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]}
    everything = (await client.post("/v1/rerank", json=body)).json()["results"]
    body |= {"top_n": 2, "return_documents": True}
    best = (await client.post("/v1/rerank", json=body)).json()["results"]
    assert [result["index"] for result in best] == [result["index"] for result in everything[:2]]
    assert [result["document"] for result in best] == [
        {"text": DOCUMENTS[result["index"]]} for result in best
    ]
    for top_n, n in ((0, 0), (3, 3), (99, 3)):
        answer = await client.post("/v1/rerank", json=body | {"top_n": top_n})
        assert len(answer.json()["results"]) == n


async def test_the_form_of_tei(client: httpx.AsyncClient) -> None:
    body = {"query": "cat", "texts": DOCUMENTS}
    raw = (await client.post("/rerank", json=body)).json()
    assert all(set(result) == {"index", "score"} for result in raw)
    assert (await client.post("/rerank", json=body | {"raw_scores": True})).json() == raw
    body |= {"return_text": True, "raw_scores": False, "top_n": 2}
    shares = (await client.post("/rerank", json=body)).json()
    assert len(shares) == 2
    for share, result in zip(shares, raw, strict=False):
        assert share["index"] == result["index"]
        assert share["text"] == DOCUMENTS[result["index"]]
        assert share["score"] == pytest.approx(1 / (1 + math.exp(-result["score"])))


async def test_vllm_s_activation(client: httpx.AsyncClient) -> None:
    body = {"query": "cat", "documents": DOCUMENTS, "use_activation": False}
    raw = (await client.post("/v1/rerank", json=body)).json()["results"]
    body |= {"use_activation": True}
    shares = (await client.post("/v1/rerank", json=body)).json()["results"]
    for share, result in zip(shares, raw, strict=True):
        assert share["index"] == result["index"]
        expected = 1 / (1 + math.exp(-result["relevance_score"]))
        assert share["relevance_score"] == pytest.approx(expected)


async def test_long_documents_are_cut(client: httpx.AsyncClient) -> None:
    body = {"query": "cat", "documents": ["cat mat dog", "cat mat", "mat " * 100]}
    body |= {"max_tokens_per_doc": 2}
    answer = (await client.post("/v1/rerank", json=body)).json()
    expected = {"query": "cat", "documents": ["cat mat", "cat mat", "mat mat"]}
    assert answer == (await client.post("/v1/rerank", json=expected)).json()


async def test_a_refusal_names_the_parameter(client: httpx.AsyncClient) -> None:
    one, either = {"query": "a", "documents": ["a"]}, "Either 'documents' or 'texts' is required."
    requests: list[tuple[dict[str, Any], str, str]] = [
        ({"query": "a"}, either, "documents"),
        (one | {"texts": ["b"]}, either, "documents"),
        (
            {"query": "a", "documents": []},
            "'documents' must be a list of strings, and not empty.",
            "documents",
        ),
        (
            {"query": "a", "documents": ["a", {"title": "b"}]},
            "'documents' must be a list of strings, or of objects with a 'text'.",
            "documents",
        ),
        (
            one | {"return_text": True},
            "'return_text' does not go with 'documents'.",
            "return_text",
        ),
        (
            {"query": "a", "texts": ["a"], "return_documents": True},
            "'return_documents' does not go with 'texts'.",
            "return_documents",
        ),
        (
            one | {"truncate_prompt_tokens": 0},
            "'truncate_prompt_tokens' must be -1 or a positive integer.",
            "truncate_prompt_tokens",
        ),
        (
            one | {"rank_fields": ["title"]},
            "'rank_fields' is not supported with this value; leave it out.",
            "rank_fields",
        ),
        (
            {"query": "a", "texts": ["a"], "use_activation": True},
            "'use_activation' does not go with 'texts'.",
            "use_activation",
        ),
    ]
    for body, message, param in requests:
        answer = await client.post("/v1/rerank", json=body)
        assert (answer.status_code, answer.json()) == (400, error_body(message, param))


@pytest.mark.parametrize(
    "fields",
    [
        {"truncate": True},
        {"truncate": "END", "max_chunks_per_doc": 1, "rank_fields": ["text"]},
        {"truncate_prompt_tokens": -1, "truncation_side": "right"},
        {"truncation": True, "truncation_direction": "Right"},
    ],
    ids=str,
)
async def test_long_documents_are_cut_on_request(
    client: httpx.AsyncClient, fields: dict[str, Any]
) -> None:
    async def ranked(*documents: str, **more: Any) -> Any:
        body = {"query": "cat", "documents": documents, **more}
        answer = await client.post("/v1/rerank", json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()

    assert await ranked(*DOCUMENTS, **fields) == await ranked(*DOCUMENTS)
    cut = await ranked("mat", "cat " * 20 + "mat " * 80, **fields)
    assert cut == await ranked("mat", "cat " * 20 + "mat " * 39)  # of 64 tokens with the query
    assert await ranked("cat mat dog", truncate_prompt_tokens=7) == await ranked("cat mat")
    answer = await client.post(
        "/rerank", json={"query": "cat mat", "texts": ["a"], "truncate_prompt_tokens": 4}
    )
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "query")
    of_end = await ranked("cat mat dog", truncate_prompt_tokens=7, truncation_side="left")
    assert of_end == await ranked("mat dog")


async def test_a_document_that_is_too_long(client: httpx.AsyncClient) -> None:
    for name in ("documents", "texts"):
        body = {"query": "cat", name: ["mat", "cat " * 80]}
        answer = await client.post("/v1/rerank", json=body)
        assert answer.status_code == 400
        assert answer.json() == error_body(
            f"'{name}[1]' is too large: a text of 85 tokens, where the context of the model holds "
            "64.",
            f"{name}[1]",
            code="context_length_exceeded",
            type="exceed_context_size_error",
            n_prompt_tokens=85,
            n_ctx=64,
        )


async def test_many_documents_in_one_request(model: Path) -> None:
    async with opened(model, ubatch_size=64) as client:
        body = {"query": "cat", "documents": DOCUMENTS * 200}
        results = (await client.post("/v1/rerank", json=body)).json()["results"]
        assert sorted(result["index"] for result in results) == list(range(600))


async def test_servers_that_do_not_rank(client: httpx.AsyncClient) -> None:
    wanted = error_body(
        "This server does not support reranking. Start it with `--reranking`", None, status=501
    )
    async with client_of() as other:
        for path in ROUTES:
            answer = await other.post(path, json={})
            assert (answer.status_code, answer.json()) == (501, wanted)
    answer = await client.post("/v1/embeddings", json={"input": "cat"})
    assert answer.status_code == 501
    assert answer.json() == error_body(
        "This server ranks documents and computes no embeddings.", None, status=501
    )
