"""Cohere's routes, version 2."""

from __future__ import annotations

import base64
import math
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import numpy as np
import pytest
from gguf import PoolingType

from tests.support.clients import client_of_app
from tests.support.gguf_models import WIDTH, write_bert
from tests.support.media_files import image_file
from tests.support.media_models import write_pair
from trioserve.app import create_app
from trioserve.config import Config

#: The fields left out since the last call, by the log, each with the reason.
LeftOut: TypeAlias = Callable[[], list[tuple[str, str]]]

DOCUMENTS = ["a cat", "dog", "the mat"]
CLOSE = 1e-4


def opened(path: Path, **config: Any) -> AbstractAsyncContextManager[httpx.AsyncClient]:
    return client_of_app(create_app(Config(model=str(path), threads=1, **config)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture
async def ranking(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    path = folder / "rank.gguf"
    write_bert(path, pooling=PoolingType.RANK, labels=["relevant"], seed=2)
    async with opened(path, reranking=True) as client:
        yield client


@pytest.fixture
async def embedding(folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    async with opened(write_bert(folder / "mean.gguf").path, embeddings=True) as client:
        yield client


async def test_documents_are_ranked_from_0_to_1(ranking: httpx.AsyncClient) -> None:
    body = {"query": "cat", "documents": DOCUMENTS}
    raw = (await ranking.post("/v1/rerank", json=body)).json()
    body |= {"model": "m", "top_n": 2, "priority": 999}
    answer = await ranking.post("/v2/rerank", json=body)
    written = answer.json()
    assert answer.status_code == 200
    assert written["id"] == answer.headers["x-request-id"]
    assert written["meta"]["api_version"] == {"version": "2", "is_experimental": False}
    assert written["meta"]["billed_units"] == {"search_units": 1, "input_tokens": 20}
    expected = [
        (one["index"], pytest.approx(1 / (1 + math.exp(-one["relevance_score"])), abs=CLOSE))
        for one in raw["results"][:2]
    ]
    assert [(one["index"], one["relevance_score"]) for one in written["results"]] == expected


async def test_documents_are_cut_and_repeated(ranking: httpx.AsyncClient) -> None:
    body = {"query": "cat", "documents": ["mat dog cat", "mat " * 100], "max_tokens_per_doc": 2}
    body |= {"return_documents": True}
    written = (await ranking.post("/v2/rerank", json=body)).json()
    expected = {"query": "cat", "documents": ["mat dog", "mat mat"], "max_tokens_per_doc": 4096}
    whole = (await ranking.post("/v2/rerank", json=expected)).json()
    for one in written["results"]:
        assert one.pop("document") == {"text": body["documents"][one["index"]]}
    assert (written["results"], written["meta"]) == (whole["results"], whole["meta"])


async def test_embeddings_by_type(embedding: httpx.AsyncClient, left_out: LeftOut) -> None:
    openai = (await embedding.post("/v1/embeddings", json={"input": DOCUMENTS})).json()
    wanted = [one["embedding"] for one in openai["data"]]
    body = {
        "model": "m",
        "texts": DOCUMENTS,
        "input_type": "search_document",
        "embedding_types": ["float", "base64", "binary", "ubinary"],
    }
    written = (await embedding.post("/v2/embed", json=body)).json()
    assert [what for what, _ in left_out()] == ["input_type"]
    assert written["texts"] == DOCUMENTS
    assert written["response_type"] == "embeddings_by_type"
    n_tokens = openai["usage"]["prompt_tokens"]
    assert written["meta"]["billed_units"] == {"input_tokens": n_tokens}
    found = written["embeddings"]
    assert found.keys() == {"float", "base64", "binary", "ubinary"}
    for i, vector in enumerate(wanted):
        assert found["float"][i] == pytest.approx(vector, abs=CLOSE)
        packed = np.frombuffer(base64.b64decode(found["base64"][i]), "<f4")
        assert packed == pytest.approx(vector, abs=CLOSE)
        bits = np.packbits(np.array(found["float"][i]) > 0)
        assert found["ubinary"][i] == bits.tolist()
        assert found["binary"][i] == [int(byte) - 128 for byte in bits]
        assert len(bits) == WIDTH // 8
    short = (await embedding.post("/v2/embed", json={"texts": ["a"], "output_dimension": 4})).json()
    assert short["embeddings"].keys() == {"float"}
    assert np.linalg.norm(short["embeddings"]["float"]) == pytest.approx(1, abs=CLOSE)


async def test_texts_that_are_too_long_are_cut(embedding: httpx.AsyncClient) -> None:
    long, most = "cat " * 40 + "dog " * 40, 64

    async def vector(text: str, **options: Any) -> list[float]:
        answer = await embedding.post("/v2/embed", json={"texts": [text], **options})
        found: list[float] = answer.json()["embeddings"]["float"][0]
        return found

    beginning, end = "cat " * 40 + "dog " * (most - 42), "cat " * (most - 42) + "dog " * 40
    assert await vector(long) == pytest.approx(await vector(beginning), abs=CLOSE)
    assert await vector(long, truncate="START") == pytest.approx(await vector(end), abs=CLOSE)
    assert await vector(long, max_tokens=4) == pytest.approx(await vector("cat cat"), abs=CLOSE)
    answer = await embedding.post("/v2/embed", json={"texts": ["a", long], "truncate": "NONE"})
    assert answer.status_code == 400
    assert answer.json()["message"].startswith("'texts[1]' is too large: a text of 82 tokens")
    body = {"texts": ["a", "cat cat cat"], "truncate": "NONE", "max_tokens": 4}
    answer = await embedding.post("/v2/embed", json=body)
    assert answer.status_code == 400
    assert answer.json()["message"] == (
        "'texts[1]' is too large: a text of 5 tokens, where 'max_tokens' is 4."
    )
    assert (await embedding.post("/v2/embed", json=body | {"max_tokens": 5})).status_code == 200


@pytest.mark.system
async def test_images_and_mixed_inputs(folder: Path) -> None:
    pair = write_pair(folder, "mlp")
    url = "data:image/png;base64," + base64.b64encode(image_file(size=(60, 60))).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    config = {"mmproj": str(pair.projector), "embeddings": True, "pooling": "mean"}
    async with opened(pair.model, **config) as client:
        alone = (
            await client.post("/v2/embed", json={"images": [url], "input_type": "image"})
        ).json()
        mixed = [{"content": [part]}, {"content": [{"type": "text", "text": "a cat"}]}]
        both = (await client.post("/v2/embed", json={"inputs": mixed})).json()
        text = (await client.post("/v2/embed", json={"texts": ["a cat"]})).json()
        assert "embeddings" in both, both
    first, second = both["embeddings"]["float"]
    assert first == pytest.approx(alone["embeddings"]["float"][0], abs=CLOSE)
    assert second == pytest.approx(text["embeddings"]["float"][0], abs=CLOSE)
    assert "texts" not in both


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"query": "a", "documents": []}, "'documents' must be a list of strings, and not empty."),
        (
            {"query": "a", "documents": [{"text": "b"}]},
            "'documents' must be a list of strings.",
        ),
        (
            {"query": "a", "documents": ["cat " * 80]},
            "'documents' is too large: a text of 85 tokens, where the context of the model holds "
            "64.",
        ),
    ],
)
async def test_invalid_rankings(
    ranking: httpx.AsyncClient, body: dict[str, Any], message: str
) -> None:
    answer = await ranking.post("/v2/rerank", json=body)
    assert answer.status_code == 400
    assert answer.json() == {"id": answer.headers["x-request-id"], "message": message}


TEXTS = {"texts": ["a"]}


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({}, "'texts' is required, or 'images', or 'inputs'."),
        (TEXTS | {"images": ["data:,"]}, None),
        (TEXTS | {"inputs": [{"content": []}]}, "'texts' and 'inputs' exclude each other."),
        (
            {"inputs": [{}]},
            "'inputs' must be a list of objects with a list as 'content', and not empty.",
        ),
        (
            TEXTS | {"embedding_types": ["int8"]},
            "'embedding_types' must be a list of float, base64, binary, ubinary, and not empty.",
        ),
        (
            TEXTS | {"output_dimension": 99},
            f"'output_dimension' is 99, and the model's embeddings have {WIDTH}.",
        ),
        (
            {"inputs": [{"content": [{"type": "text", "text": "a"}]}], "max_tokens": 3},
            "'max_tokens' is for 'texts'.",
        ),
    ],
)
async def test_invalid_texts(
    embedding: httpx.AsyncClient, body: dict[str, Any], message: str | None
) -> None:
    answer = await embedding.post("/v2/embed", json=body)
    assert answer.status_code == 400
    if message is not None:
        assert answer.json()["message"] == message


async def test_servers_that_cannot(
    ranking: httpx.AsyncClient, embedding: httpx.AsyncClient
) -> None:
    for client, path in ((ranking, "/v2/embed"), (embedding, "/v2/rerank")):
        answer = await client.post(path, json={})
        assert answer.status_code == 501
        assert answer.json().keys() == {"id", "message"}


@pytest.mark.parametrize("order", ["higher-first", "lower-first"])
async def test_the_order_of_priorities_is_cohere_s(folder: Path, order: str) -> None:
    async with opened(folder / "mean.gguf", embeddings=True, priority_order=order) as client:
        for priority, status in ((999, 200), (0, 200), (-1, 400)):
            answer = await client.post("/v2/embed", json=TEXTS | {"priority": priority})
            assert answer.status_code == status
